"""``tools.slow_link``: its network, settings and predictions; what it makes and takes down, where root may."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess

import pytest
import torch

from megatron_mtraining.planner.clock import CallSizes, predict, step_seconds
from tools.slow_link import network as networks
from tools.slow_link.__main__ import OUTER_SECONDS, cells_of, main, parse_arguments, sizes_of
from tools.slow_link.call import ROLES, SEQ, Links, Setting, Sizes, predictions
from tools.slow_link.network import PREFIX, SWITCH, Network, namespace, set_up, set_up_commands

LINKS = Links(inner_mb_s=24.0, outer_mb_s=6.0, inner_latency_us=50.0, outer_latency_us=100.0, flat_mb_s=5.0)
SIZES = Sizes(num_nodes=2, node_size=2, head_dim=18)


def reason_to_skip():
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return "needs root, ip and tc"
    probe = f"{PREFIX}probe"
    bucket = ["lo" if part == "outer" else part for part in networks.rate_command("outer", 1.0)]
    commands = (["ip", "netns", "add", probe], ["ip", "netns", "exec", probe, *bucket], ["ip", "netns", "del", probe])
    results = [subprocess.run(command, capture_output=True, check=False).returncode for command in commands]
    return "the kernel makes no network namespaces or token buckets here" if any(results) else ""


def test_ranks_of_a_node_reach_each_other_over_inner_links():
    commands = list(set_up_commands(Network(num_nodes=2, node_size=3, inner_mb_s=24, outer_mb_s=2)))
    made = [command[3] for command in commands if command[:3] == ["ip", "netns", "add"]]
    assert made == [SWITCH, *map(namespace, range(6))]
    routes = {(command[2], command[5]) for command in commands if "route" in command}
    peers = {0: (1, 2), 1: (0, 2), 2: (0, 1), 3: (4, 5), 4: (3, 5), 5: (3, 4)}
    assert routes == {(namespace(rank), f"10.77.0.{peer + 1}/32") for rank in peers for peer in peers[rank]}
    ports = {command[5]: command[7] for command in commands if "master" in command}
    assert ports == {f"inner{rank}": f"node{rank // 3}" for rank in range(6)} | {
        f"outer{rank}": "outer" for rank in range(6)
    }
    rates = [
        (command[command.index("dev") + 1], command[command.index("rate") + 1])
        for command in commands
        if "tbf" in command
    ]
    assert sorted(set(rates)) == [("inner", "192000000bit"), ("outer", "16000000bit")] and len(rates) == 12


@pytest.mark.parametrize("schedule", ["hierarchical", "flat", "gather"])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_compute_of_a_node_is_that_share_of_an_outer_transfer(schedule, ratio):
    setting = Setting("zigzag", schedule, ratio)
    work = SIZES.work("zigzag", schedule)
    profile, ring = SIZES.profile(LINKS, work, setting), SIZES.ring(setting.schedule)
    seconds = step_seconds("forward", work, profile, ring=ring, head_dim=SIZES.head_dim)
    expected = LINKS.outer_seconds(SIZES.kv_bytes) / ratio
    assert float(seconds.sum(1).mean()) / SIZES.num_nodes == pytest.approx(expected)


def test_keys_take_as_long_between_nodes_as_is_meant():
    options = parse_arguments(["--nodes", "4", "--node-size", "1"])[1]
    sizes = sizes_of(options, 6.0)
    assert sizes.kv_bytes == 4 * SEQ // 4 * sizes.head_dim
    assert sizes.kv_bytes / 6e6 == pytest.approx(OUTER_SECONDS, rel=0.05)


@pytest.mark.parametrize("schedule", ["hierarchical", "flat", "gather"])
@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_predictions_are_the_planner_s(schedule, layout):
    """Measured waits change no time; waits and compute fill the mean rank's time up to its end."""
    setting = Setting(layout, schedule, 1.0)
    work, ring = SIZES.work(layout, schedule), SIZES.ring(schedule)
    sizes = CallSizes(seq_len=SEQ, num_heads=1, num_kv_heads=1, head_dim=SIZES.head_dim)
    expected = predict(work, ring, sizes, SIZES.profile(LINKS, work, setting), pack_width=0)
    predicted = predictions(SIZES, setting, LINKS, reduces_at_once=False)
    for direction in ("forward", "backward"):
        each, other = predicted[direction], getattr(expected, direction)
        assert each.ms == pytest.approx(other.gpu_ms)
        assert set(each.waits_ms) == set(ROLES)
        assert sum(each.waits_ms.values()) <= other.exposed_ms + 1e-6
        assert max(other.compute_ms, each.bound_ms) <= each.ms + 1e-6


def test_a_reduce_scatter_at_once_hides_nothing():
    """Of ``gather``, whose steps go on beside one that is posted; rings of exchanges have none."""
    for schedule, is_longer in (("gather", True), ("hierarchical", False)):
        both = [
            predictions(SIZES, Setting("striped", schedule, 1.0), LINKS, reduces_at_once=each)["backward"].ms
            for each in (True, False)
        ]
        assert (both[0] > both[1] + 10) if is_longer else both[0] == both[1]


def test_a_flat_ring_waits_for_the_slow_link_and_a_hierarchical_one_does_not():
    slow = {s: predictions(SIZES, Setting("node_striped", s, 1.0), LINKS)["forward"] for s in ("hierarchical", "flat")}
    assert slow["hierarchical"].waits_ms["outer"] < 0.05 * slow["hierarchical"].ms
    assert slow["flat"].waits_ms["outer"] > 0.1 * slow["flat"].ms


def test_cells_are_medians_and_shares():
    row = {"layout": "striped", "schedule": "flat", "ratio": 1.0}
    repeats = [{"ms": ms, **dict.fromkeys(ROLES, ms / 10)} for ms in (100.0, 300.0, 110.0)]
    cells = list(cells_of(row | {"repeats": {"forward": repeats, "backward": repeats}}, SIZES, LINKS))
    assert [each[:5] for each in cells] == [
        ["1", "flat", "striped", "forward", "110.0"],
        ["1", "flat", "striped", "backward", "110.0"],
    ]
    assert cells[0][8:11] == ["20.0", "10.0", "10.0"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--nodes 1", r"--nodes must be a whole number from 2 to 4, got 1\."),
        ("--ratios 0", r"--ratios must be a number from 0\.01 to 100, got 0\."),
        ("--schedules ring", r"--schedules must be some of hierarchical, flat, gather, got ring\."),
    ],
)
def test_bad_arguments(capsys, tmp_path, flags, sentence):
    with pytest.raises(SystemExit, match="2"):
        main([*flags.split(), "--output", str(tmp_path)])
    error = capsys.readouterr().err
    assert re.match(f"python -m tools.slow_link: error: {sentence}", error) and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("os.geteuid", lambda: 1000, r"the user must be root to make network namespaces, got user 1000\. Use sudo\."),
        ("shutil.which", lambda name: None, r"ip and tc must be installed, got no ip and no tc\. Install iproute2\."),
    ],
)
def test_a_machine_that_cannot(monkeypatch, capsys, tmp_path, name, value, sentence):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(["--output", str(tmp_path)])
    assert re.match(f"python -m tools.slow_link: error: {sentence}", capsys.readouterr().err)


def test_one_run_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setattr(networks, "LOCK", tmp_path / "lock")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (
            pytest.raises(ValueError, match="another run holds"),
            set_up(Network(num_nodes=2, node_size=1, inner_mb_s=1, outer_mb_s=1)),
        ):
            pass


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [name for name in re.findall(r"^\S+", listed, re.MULTILINE) if name.startswith(PREFIX)]


@pytest.fixture
def root():
    if reason := reason_to_skip():
        pytest.skip(reason)


def test_what_an_ended_run_left_is_taken_down(root):
    """Namespace, links and a process inside."""
    network = Network(num_nodes=2, node_size=2, inner_mb_s=24, outer_mb_s=6)
    with set_up(network):
        assert len(namespaces()) == 5
    assert not namespaces()
    subprocess.run(["ip", "netns", "add", namespace(0)], check=True)
    left = subprocess.Popen(["ip", "netns", "exec", namespace(0), "sleep", "600"])
    with set_up(network):
        assert left.wait(timeout=10) != 0
        ping = ["ip", "netns", "exec", namespace(0), "cat", "/proc/net/route"]
        assert "inner" in subprocess.run(ping, capture_output=True, text=True, check=True).stdout
    assert not namespaces()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_run(root, tmp_path, capsys):
    flags = "--shares 4 --ratios 0.5 --layouts striped --schedules hierarchical,gather --repeats 1"
    main([*flags.split(), "--output", str(tmp_path)])
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "slow_link.json").read_text())
    assert [(row["schedule"], row["direction"]) for row in written["table"]] == [
        (schedule, direction) for schedule in ("hierarchical", "gather") for direction in ("forward", "backward")
    ]
    for row in written["table"]:
        assert row["ms"] in out and float(row["ms"]) > 0
    assert not namespaces()
