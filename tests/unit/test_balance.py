"""The balance command: its table, file and figures, its numbers for 32 ranks, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_mtraining.commands.balance.command import index_of, main, parse_arguments
from megatron_mtraining.commands.balance.replay import GATHERED, Replayer
from megatron_mtraining.commands.balance.synthetic import IndexShape, synthetic_index
from megatron_mtraining.config import INDEX_SHARINGS
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.metrics import Recording, rank_pairs, work_of_pairs
from megatron_mtraining.metrics.indices import stretched
from megatron_mtraining.planner.clock import CallSizes, predict
from megatron_mtraining.planner.profile import PROFILES
from megatron_mtraining.ring import RingShape

RECORDED = Path(__file__).parents[2] / "tools/bench/data/tiny_gpt.json"
SIZES = CallSizes(seq_len=524288, num_heads=16, num_kv_heads=2, head_dim=128)


def index_named(name):
    if name == "clustered":
        return synthetic_index(IndexShape(run=16), seq_len=SIZES.seq_len, num_lists=16)
    scatter = torch.Generator().manual_seed(0) if name == "scattered" else None
    return Recording.load(RECORDED).index(seq_len=SIZES.seq_len, num_heads=16, scatter=scatter)


@pytest.mark.parametrize("name", ["recorded", "scattered", "clustered"])
def test_four_nodes_of_eight(name):
    """The figures of docs/balance.md: 25 GB/s between nodes, 300 inside, verticals gathered once."""
    replayer = Replayer(index=index_named(name), sizes=SIZES, profile=PROFILES["h200"], node_size=8)
    work, ms = {}, {}
    for replay in replayer.replays(32, ["striped", "node_striped", "zigzag"], ["hierarchical", "flat", "gather"]):
        if replay.verticals == GATHERED:
            work[replay.layout, replay.ring.kind] = replay.work
            ms[replay.layout, replay.ring.kind] = replay.gpu_ms
    assert work["striped", "hierarchical"].worker_imbalance <= 1.01
    assert work["striped", "flat"].step_imbalance <= 1.02
    for schedule in ("hierarchical", "gather"):
        ours = work["node_striped", schedule]
        assert ours.worker_imbalance <= 1.01 and ours.step_imbalance <= 1.02
    lockstep = {"recorded": 1.467, "scattered": 1.192, "clustered": 1.101}[name]
    assert work["striped", "hierarchical"].step_imbalance == pytest.approx(lockstep, abs=2e-3)
    zigzag = {"recorded": (1.048, 2.363), "scattered": (1.036, 2.231), "clustered": (1.023, 1.341)}[name]
    of_zigzag = work["zigzag", "hierarchical"]
    assert (of_zigzag.worker_imbalance, of_zigzag.step_imbalance) == pytest.approx(zigzag, abs=2e-3)
    assert ms["node_striped", "gather"] < ms["node_striped", "hierarchical"] <= ms["striped", "hierarchical"]
    assert ms["node_striped", "hierarchical"] < ms["zigzag", "hierarchical"] < ms["striped", "flat"] / 3


def test_shared_lists_are_packed_once_for_a_key_value_head():
    packs = []
    for index_sharing in INDEX_SHARINGS:
        flags = ["clustered", "--seq", "65536", "--index-sharing", index_sharing]
        index, sizes = index_of(parse_arguments(flags))
        assert index.num_lists == 16, "pairs are those of every head"
        ring = RingShape(kind="flat", cp_size=8, node_size=8)
        pairs = rank_pairs(index, SequenceLayout("striped", seq_len=65536, cp_size=8))
        work, width = work_of_pairs(*pairs, ring.source_ranks()), index.vertical.shape[2]
        sent = [
            predict(work, ring, sizes, PROFILES["h200"], pack_width=each).forward.inner_bytes for each in (width, 0)
        ]
        packs.append(sent[0] - sent[1])
    assert packs[0] == 8 * packs[1] > 0


@pytest.fixture
def balance(tmp_path, capsys):
    """Runs the tool on small sizes; what it printed and the folder that it wrote."""

    def run(arguments: str) -> tuple[str, Path]:
        flags = f"--seq 65536 --heads 4 --kv-heads 2 --head-dim 64 --output {tmp_path} {arguments}"
        main([str(RECORDED), *flags.split()])
        return capsys.readouterr().out, tmp_path

    return run


def test_table_and_file(balance):
    out, folder = balance("--world 1,3,4 --node 4 --layouts striped --schedules gather,flat --no-figures --seq 49152")
    written = json.loads((folder / "balance.json").read_text())
    assert [row["ranks"] for row in written["replays"]] == [1] * 4 + [3] * 4 + [4] * 4
    assert {row["schedule"] for row in written["replays"]} == {"gather", "flat"}
    assert written["profile"]["inner_gb_s"] == 300 and written["tokens"] == 49152
    for row in written["replays"]:
        assert row["layout"] in out and f"{row['lockstep_imbalance']:.3f}" in out
    assert [row["name"] for row in written["ablation"]][0] == "striped, hierarchical (ours)"
    assert not list(folder.glob("*.png"))


def test_links_of_the_command_line(balance):
    _, folder = balance("--world 4 --node 2 --layouts striped --schedules flat --no-figures --outer-gb-s 1")
    written = json.loads((folder / "balance.json").read_text())
    assert written["profile"]["outer_gb_s"] == 1 and "outer_gb_s" in written["profile"]["source"]


def test_figures_are_drawn(balance):
    pytest.importorskip("matplotlib")
    out, folder = balance("--world 2,4 --node 2 --schedules hierarchical")
    pictures = sorted(folder.glob("*.png"))
    names = ["ablation", "balance_of_ranks_and_steps", "imbalance_over_ranks", "work_by_rank_and_step"]
    assert [picture.stem for picture in pictures] == names
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.name in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--world 4,x", r"--world must be a whole number from 1 to \d+, got x\."),
        ("--world 12 --node 8", r"cp_size must be up to the 8 ranks of a node or a multiple of it, got 12\."),
        ("--world 4 --layouts star", r"--layouts must be some of contiguous, .*token_striped, got star\."),
        ("--world 4 --seq 5000", r"seq_len must be a multiple of the 4096 tokens that were recorded, got 5000\."),
        (
            "--world 64 --seq 4096",
            r"seq_len must be a multiple of 8192 for the zigzag layout over 64 ranks, got 4096\.",
        ),
        ("--world 4 --profile fast", r"profile must be a readable JSON file, got fast"),
        (f"--world 4 --output {__file__}", r"--output must be a folder that can be written, got \S+: File exists\."),
        ("--world 4 --kv-heads 3", r"--heads must be a multiple of --kv-heads 3, got 4\."),
    ],
)
def test_bad_input_is_one_sentence(balance, capsys, arguments, sentence):
    with pytest.raises(SystemExit, match="2"):
        balance(f"--no-figures {arguments}")
    error = capsys.readouterr().err
    assert re.match(f"mtraining balance: error: {sentence}", error) and error.count("\n") == 1


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"format": "other"}, r"a recorded index must be a file with format"),
        ({"slash": [[[1, 2]]] * 4}, r"slash\[0\] of a recorded index must be runs from distance 0"),
        ({"slash": [[[0, 999]]] * 4}, r"slash\[0\] of a recorded index must be ascending \[first, length\] below 64"),
        ({"vertical": [[[0, 8], [4, 2]]] * 4}, r"vertical\[0\] of a recorded index must be ascending"),
        ({"vertical": [[[0, 8, 9]]] * 4}, r"vertical\[0\] of a recorded index must be ascending"),
        ({"slash": [[[0, 1]]]}, r"slash of a recorded index must be one list of runs for each head"),
        ({"seq_len": "long"}, r"seq_len of a recorded index must be an integer of at least 1, got 'long'\."),
        ({"colour": "blue"}, r"a recorded index must be of fields block_size, .*, got .*colour"),
    ],
)
def test_a_damaged_recording_is_one_sentence(tmp_path, changed, sentence):
    path = tmp_path / "index.json"
    path.write_text(json.dumps(json.loads(RECORDED.read_text()) | changed))
    with pytest.raises(ValueError, match=sentence):
        Recording.load(path)


def test_scattered_runs_keep_their_lengths_and_places():
    runs = [[0, 3], [5, 2], [8, 1], [9, 4], [15, 1]]
    drawn = set()
    for seed in range(20):
        entries = stretched(runs, 8, torch.Generator().manual_seed(seed))
        assert entries == sorted(set(entries)) and len(entries) == 11 and entries[-1] < 16 * 8
        assert entries[:3] == [0, 1, 2] and 40 <= entries[3] < 48 and entries[4] == entries[3] + 1
        drawn.add(entries[3])
    assert len(drawn) > 4


def test_a_recording_of_an_index_gives_it_back():
    index = index_named("clustered")
    recording = Recording.of(index, seq_len=SIZES.seq_len, source={"origin": "a test"})
    again = recording.index(seq_len=SIZES.seq_len, num_heads=16)
    for name in ("vertical", "num_vertical", "slash", "num_slash"):
        assert torch.equal(getattr(again, name), getattr(index, name))
