"""How often a call communicates, in which group and in which order: exact counts, and Algorithm 2 as a log."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_mtraining.config import SCHEDULES
from megatron_mtraining.layout import shard_sequence
from megatron_mtraining.ring import attention as ring_module
from megatron_mtraining.testing.simulator import RankSimulator

from .cases import group_arguments, layout_of, random_problem
from .recording import RecordingBackend, RecordingTransport, recording_groups, start_log


@pytest.fixture
def run_recorded(monkeypatch):
    """Runs forward and backward on every rank; gives each rank's two logs."""
    monkeypatch.setattr(ring_module, "resolve_backend", lambda *_, **__: RecordingBackend())

    def run(schedule, *, cp_size, inner_size):
        problem = random_problem(cp_size * 8, block_size=4, heads=(2, 1))
        layout = layout_of(problem, "striped", cp_size)

        def body(group):
            forward_log = start_log()
            inputs = [shard_sequence(each, layout, cp_rank=group.rank, dim=1).requires_grad_() for each in problem[:3]]
            result = ring_module.ring_attention(
                *inputs,
                problem.index,
                layout=layout,
                cp_group=RecordingTransport("cp", group),
                schedule=schedule,
                **group_arguments(recording_groups(group.ring_groups(inner_size))),
            )
            backward_log = start_log()
            result.out.sum().backward()
            return forward_log, backward_log

        return RankSimulator(cp_size).run(body)

    return run


def transfers(log):
    """How often each group does what, waiting and computing left out."""
    return Counter(entry for entry in log if " " in entry and not entry.endswith(" wait"))


@pytest.mark.parametrize(("cp_size", "inner_size"), [(2, 1), (2, 2), (4, 2), (5, 5), (6, 2), (6, 3)])
def test_number_of_transfers_of_two_levels(run_recorded, cp_size, inner_size):
    nodes = cp_size // inner_size
    keys = {"inner exchange": nodes * (inner_size - 1), "outer exchange": nodes - 1}
    gradients = {"inner_gradient exchange": nodes * (inner_size - 1), "outer_gradient exchange": nodes - 1}
    for forward, backward in run_recorded("hierarchical", cp_size=cp_size, inner_size=inner_size):
        assert transfers(forward) == Counter({"cp all_gather": 1, "cp assemble": 1} | keys)
        assert transfers(backward) == Counter({"cp all_reduce": 1} | keys | gradients)


@pytest.mark.parametrize(("cp_size", "inner_size"), [(2, 2), (4, 2), (6, 3)])
def test_number_of_transfers_when_a_node_gathers(run_recorded, cp_size, inner_size):
    nodes = cp_size // inner_size
    keys = {"inner all_gather": 2 * nodes, "outer exchange": nodes - 1}
    gradients = {"inner_gradient reduce_scatter": nodes, "outer_gradient exchange": nodes - 1}
    for forward, backward in run_recorded("gather", cp_size=cp_size, inner_size=inner_size):
        assert transfers(forward) == Counter({"cp all_gather": 1, "cp assemble": 1} | keys)
        assert transfers(backward) == Counter({"cp all_reduce": 1} | keys | gradients)


@pytest.mark.parametrize(
    ("cp_size", "inner_size", "gradient_group"), [(4, 4, "inner_gradient"), (4, 2, "cp"), (5, 1, "cp")]
)
def test_number_of_transfers_of_a_flat_ring(run_recorded, cp_size, inner_size, gradient_group):
    """Gradients have a group of their own where one spans the whole context-parallel group."""
    keys = {"cp exchange": cp_size - 1}
    for forward, backward in run_recorded("flat", cp_size=cp_size, inner_size=inner_size):
        assert transfers(forward) == Counter({"cp all_gather": 1, "cp assemble": 1} | keys)
        gradients = Counter({f"{gradient_group} exchange": cp_size - 1})
        assert transfers(backward) == Counter({"cp all_reduce": 1} | keys) + gradients


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_exchanges_nothing(run_recorded, schedule):
    """What is left are operations that a group of one answers from its input."""
    ((forward, backward),) = run_recorded(schedule, cp_size=1, inner_size=1)
    assert not [entry for entry in forward + backward if "exchange" in entry]
    assert "cp all_gather" not in forward


def test_transfers_are_posted_before_what_hides_them(run_recorded):
    """Algorithm 2 on two nodes of two: outer transfer, inner loop, synchronise; gradients follow one step behind."""
    inner_loop = ["inner exchange", "slash_forward", "inner wait", "slash_forward"]
    first_round = ["outer exchange", "inner exchange", "forward", *inner_loop[2:], "outer wait"]
    inner_back = ["inner exchange", "slash_backward", "inner wait", "slash_backward"]
    home = ["inner_gradient exchange", "inner_gradient wait"]
    first_back = ["outer exchange", "inner exchange", "backward", "cp all_reduce", *inner_back[2:], *home]
    for forward, backward in run_recorded("hierarchical", cp_size=4, inner_size=2):
        assert forward == ["cp all_gather", "pack_vertical", "cp assemble", *first_round, *inner_loop]
        assert backward == [
            "softmax_delta",
            *first_back,
            "outer wait",
            *inner_back,
            *home,
            "outer_gradient exchange",
            "outer_gradient wait",
            "unpack_vertical_grad",
        ]


def test_gradients_travel_while_the_next_step_computes(run_recorded):
    """A flat ring of four: sums are posted after a step and waited for only when the next one has computed."""
    for _, backward in run_recorded("flat", cp_size=4, inner_size=4):
        first, step = "backward", "slash_backward"
        computed = [entry for entry in backward if entry in (first, step) or entry.startswith("inner_gradient")]
        post, wait = "inner_gradient exchange", "inner_gradient wait"
        assert computed == [first, step, post, step, wait, post, step, wait, post, wait]
