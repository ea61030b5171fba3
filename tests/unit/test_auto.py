"""``auto``: layout and schedule by the replay, the same for all ranks, and no others where they are named."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import pytest
import torch

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.metrics import rank_pairs, work_of_pairs
from megatron_mtraining.metrics.indices import drawn_index
from megatron_mtraining.planner import auto
from megatron_mtraining.planner.auto import RingCall, candidates, decide, density_of
from megatron_mtraining.planner.profile import PROFILES, profile_of_machine
from megatron_mtraining.ring import RingShape
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport.groups import Placement

CONFIG = MTrainingConfig(profile="h200")
FOUR_NODES = RingCall(cp_size=32, node_size=8, seq_len=524288)


def decided(call: RingCall, **changes) -> tuple[str, str]:
    config = decide(replace(CONFIG, **changes), call)
    return config.layout, config.schedule


def test_the_default_is_even_over_steps_on_32_ranks_in_nodes_of_8():
    layout, schedule = decided(FOUR_NODES)
    index = drawn_index(524288, num_heads=2, max_vertical=0, max_slash=800)
    tokens = SequenceLayout(layout, seq_len=524288, cp_size=32, node_size=8)
    ring = RingShape(kind=schedule, cp_size=32, node_size=8)
    assert work_of_pairs(*rank_pairs(index, tokens), ring.source_ranks()).step_imbalance <= 1.02


def test_what_is_named_stays():
    assert decided(FOUR_NODES, layout="zigzag", schedule="flat") == ("zigzag", "flat")
    assert decided(FOUR_NODES, layout="rotated")[0] == "rotated"
    assert decided(FOUR_NODES, schedule="flat") == ("striped", "flat")
    assert decided(FOUR_NODES, schedule="hierarchical") == ("node_striped", "hierarchical")


def test_one_rank_needs_no_replay(monkeypatch):
    monkeypatch.setattr(auto, "candidates", None)
    assert decided(RingCall(cp_size=1, node_size=1)) == ("striped", "hierarchical")


@pytest.mark.parametrize(("cp_size", "node_size"), [(8, 8), (5, 1), (6, 3)])
def test_candidates_differ(cp_size, node_size):
    """In one node, and in nodes of one rank, layouts are the same, and so are flat and hierarchical."""
    call = RingCall(cp_size=cp_size, node_size=node_size, seq_len=cp_size * 16384)
    ranked, _ = candidates(call, 0.1, "h200", "auto", "auto")
    names = {(each.layout, each.schedule) for each in ranked}
    rings = {"hierarchical"} | ({"gather"} if node_size > 1 else set()) | ({"flat"} if cp_size == 6 else set())
    layouts = {"striped", "node_striped"} if cp_size == 6 else {"striped"}
    assert names == {(layout, ring) for layout in layouts for ring in rings}


PLACEMENTS = [("aaabb", 1), ("aabb", 2), ("abab", 1)]


@pytest.mark.parametrize(("hosts", "node_size"), PLACEMENTS)
def test_nodes_that_a_group_crosses_unevenly(hosts, node_size):
    """Five ranks as 3 + 2 have no inner ring that stays on its host: nodes of one rank, for which no gather is."""
    placement = Placement(rank_lists=(tuple(range(len(hosts))),), hosts=tuple(hosts))
    assert placement.inner_size() == node_size
    call = RingCall(cp_size=len(hosts), node_size=placement.inner_size())
    assert (decided(call)[1] == "hierarchical") or node_size > 1


def test_nodes_that_do_not_divide_are_one_sentence():
    with pytest.raises(ValueError, match="cp_size must be up to the 3 ranks of a node or a multiple of it, got 5"):
        decide(CONFIG, RingCall(cp_size=5, node_size=3))


@pytest.mark.parametrize("local_len", [4096, 131072])
def test_the_fastest_is_chosen_and_of_equals_an_even_one(local_len):
    """An even one, where compute hides every transfer, and none that sends more between nodes."""
    ranked, _ = candidates(replace(FOUR_NODES, seq_len=32 * local_len), 0.1, "h200", "auto", "auto")
    best, fastest = ranked[0], min(each.ms for each in ranked)
    alike = [each for each in ranked if each.ms <= 1.01 * fastest]
    assert best in alike and best.lockstep <= 1.02
    assert [each.ms for each in ranked[1:]] == sorted(each.ms for each in ranked[1:])
    assert best.schedule == ("gather" if local_len == 4096 else "hierarchical")


def test_links_and_memory_decide(tmp_path):
    """Steps that cost nothing beside slow links inside the node leave nothing for a gather to save."""
    free = {name: 0.0 for name in asdict(PROFILES["h200"]) if name.endswith("step_us")}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(replace(PROFILES["h200"], **free, inner_gb_s=1.0, outer_gb_s=0.1))))
    assert decided(FOUR_NODES)[1] == "gather"
    assert decided(FOUR_NODES, profile=str(path))[1] == "hierarchical"
    many_keys = replace(FOUR_NODES, seq_len=32 * 131072, num_kv_heads=16)
    assert decided(many_keys)[1] == "hierarchical", "a node's keys would take more than a twentieth of the memory"


def test_density_of_a_configuration():
    assert density_of(MTrainingConfig(pattern="dense"), 10**6) == density_of(MTrainingConfig(), 4096) == 1
    assert density_of(MTrainingConfig(max_density=0.03), 10**6) == 0.03
    assert 0.005 < density_of(MTrainingConfig.algorithm_1(), 524288) < 0.05


def test_the_replayed_ring_does_not_grow(monkeypatch):
    sizes, predict = [], auto.predict
    monkeypatch.setattr(
        auto,
        "predict",
        lambda work, ring, *rest, **options: sizes.append(ring) or predict(work, ring, *rest, **options),
    )
    candidates(replace(FOUR_NODES, cp_size=1024, seq_len=2**24), 0.1, "h200", "auto", "auto")
    assert {(each.cp_size, each.node_size) for each in sizes} == {(32, 8)} and len(sizes) == 6


def test_another_machine_is_warned_of_in_one_sentence(caplog):
    profile_of_machine.cache_clear()
    with caplog.at_level(logging.WARNING):
        profile_of_machine("a100")
    (record,) = caplog.records
    assert "The profile a100 is of A100, and this machine has" in record.getMessage()
    with pytest.raises(ValueError, match="profile must be a readable JSON file, got nowhere"):
        decide(replace(CONFIG, profile="nowhere"), FOUR_NODES)


def test_the_replay_has_nothing_of_its_callers_autograd_state():
    """The ring on a clock is differentiated: under inference mode, a checkpoint's hooks and another default device."""
    expected, saved = decided(FOUR_NODES), []
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor)
    for state in (torch.inference_mode(), hooks, torch.device("meta")):
        candidates.cache_clear()
        auto._drawn_work.cache_clear()
        with state:
            assert decided(FOUR_NODES) == expected
    assert not saved


def test_a_call_of_unknown_length_never_gathers():
    ranked, _ = candidates(RingCall(cp_size=32, node_size=8), 0.1, "h200", "auto", "auto")
    assert {each.schedule for each in ranked} == {"hierarchical", "flat"}


def test_a_call_decides_its_schedule_and_logs_once(caplog):
    layout = SequenceLayout("striped", seq_len=64, cp_size=4, block_size=8)
    config = MTrainingConfig(block_size=8, dense_below=0, num_probe_rows=8, num_probe_windows=1, profile="h200")

    def body(group):
        query = torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(group.rank))
        return sparse_attention(query, query, query, config, layout=layout, groups=group.ring_groups(2)).out

    auto._logged.clear()
    with caplog.at_level(logging.WARNING):
        found = RankSimulator(4).run(body)
        again = RankSimulator(4).run(body)
    assert all(map(torch.equal, found, again))
    (message,) = [record.getMessage() for record in caplog.records if record.name.endswith("planner.auto")]
    assert "on 4 ranks in nodes of 2, 2/2 heads" in message and "next striped" in message
