"""``mtraining profile``: every number of a profile is measured or named as assumed, alone and between ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from megatron_mtraining.commands.profile import command, rates
from megatron_mtraining.commands.profile.command import main, measured
from megatron_mtraining.planner.profile import NUMBERS, PROFILES, load_profile
from tests.ring.processes import outcomes_of_ranks

LINKS = {"inner_gb_s", "outer_gb_s", "inner_latency_us", "outer_latency_us"}


def test_one_process_writes_a_profile_that_is_read(tmp_path, capsys, monkeypatch):
    small = replace(rates.Sizes.of(torch.device("cpu")), seq_len=256, num_bytes=1 << 12, num_parameters=16, repeats=1)
    monkeypatch.setattr(rates.Sizes, "of", lambda device: small)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "folder" / "machine.json"
    main(["--output", str(path), "--base", "a100"])
    profile = load_profile(str(path))
    assert (profile.gpu, profile.ranks, profile.nodes) == ("cpu", 1, 1)
    changed = {name for name in NUMBERS if getattr(profile, name) != getattr(PROFILES["a100"], name)}
    assert changed == set(NUMBERS) - LINKS - {"memory_gib"}
    assert f"mtraining profile --output {path}" in profile.source
    assert (
        "From the profile a100: inner_gb_s, outer_gb_s, inner_latency_us, outer_latency_us, memory_gib."
        in profile.source
    )
    assert "slash_forward_tflops" in capsys.readouterr().out
    assert json.loads(path.read_text()) == asdict(profile)


def links_of_ranks(node_size: int) -> tuple[dict[str, float], str]:
    """Links alone: a ring of nodes of ``node_size``."""
    command.kernel_rates = command.machine_rates = lambda sizes, timer: {}
    command.host_costs = lambda *arguments: {}
    try:
        profile = measured(torch.device("cpu"), "h200", PROFILES["h200"], node_size=node_size)
    except ValueError as error:
        return {}, str(error)
    return {name: getattr(profile, name) for name in LINKS}, f"{profile.ranks} on {profile.nodes}"


@pytest.mark.parametrize(
    ("node_size", "levels", "said"),
    [(1, "outer", "2 on 2"), (3, "", "--node-size must be a divisor of the 2 ranks, got 3.")],
)
def test_links_of_a_level_are_measured_where_it_has_ranks(node_size, levels, said):
    shipped = {name: getattr(PROFILES["h200"], name) for name in LINKS}
    for outcome in outcomes_of_ranks(links_of_ranks, 2, node_size=node_size):
        assert outcome.error is None
        found, text = outcome.result
        assert text == said
        assert {name for name in found if found[name] != shipped[name]} == {n for n in LINKS if levels and levels in n}
