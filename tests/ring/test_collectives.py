"""How often a call communicates, in which group and in which order: exact counts, and Algorithm 2 as a log."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron_mtraining.attention import select, sparse_attention
from megatron_mtraining.config import SCHEDULES, MTrainingConfig
from megatron_mtraining.layout import shard_sequence
from megatron_mtraining.ring import ring as ring_module
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import SoloTransport

from .cases import layout_of, on_schedule, random_problem
from .recording import RecordingBackend, recording_groups, start_log


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
            result = sparse_attention(
                *inputs,
                on_schedule(schedule, problem.index),
                index=problem.index,
                layout=layout,
                groups=recording_groups(group.ring_groups(inner_size)),
            )
            backward_log = start_log()
            result.out.sum().backward()
            return forward_log, backward_log

        return RankSimulator(cp_size).run(body)

    return run


CONFIG = MTrainingConfig.algorithm_1(
    num_probe_rows=4, sink_tokens=2, local_blocks=1, max_vertical=4, max_slash=2, dense_below=0, block_size=4
)


@pytest.fixture
def run_layer(monkeypatch):
    """Selects and attends on every rank, in one call or in two; gives each rank's log and results."""
    monkeypatch.setattr(ring_module, "resolve_backend", lambda *_, **__: RecordingBackend())

    def run(schedule, *, cp_size, inner_size, calls):
        problem = random_problem(cp_size * 8, block_size=4, heads=(2, 1))
        layout, config = layout_of(problem, "striped", cp_size), replace(CONFIG, schedule=schedule)

        def body(group):
            inputs = [shard_sequence(each, layout, cp_rank=group.rank, dim=1).requires_grad_() for each in problem[:3]]
            ring = {"layout": layout, "groups": recording_groups(group.ring_groups(inner_size))}
            log = start_log()
            index = None if calls == 1 else select(*inputs[:2], config, **ring)
            out = sparse_attention(*inputs, config, index=index, **ring).out
            return log, [out, *torch.autograd.grad(out.sum(), inputs)]

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
        assert transfers(backward) == Counter({"cp post_all_reduce": 1} | keys | gradients)


@pytest.mark.parametrize(("cp_size", "inner_size"), [(2, 2), (4, 2), (6, 3)])
def test_number_of_transfers_when_a_node_gathers(run_recorded, cp_size, inner_size):
    nodes = cp_size // inner_size
    keys = {"inner post_all_gather": 2 * nodes, "outer exchange": nodes - 1}
    gradients = {"inner_gradient post_reduce_scatter": nodes, "outer_gradient exchange": nodes - 1}
    for forward, backward in run_recorded("gather", cp_size=cp_size, inner_size=inner_size):
        assert transfers(forward) == Counter({"cp all_gather": 1, "cp assemble": 1} | keys)
        assert transfers(backward) == Counter({"cp post_all_reduce": 1} | keys | gradients)


@pytest.mark.parametrize(
    ("cp_size", "inner_size", "gradient_group"), [(4, 4, "inner_gradient"), (4, 2, "cp"), (5, 1, "cp")]
)
def test_number_of_transfers_of_a_flat_ring(run_recorded, cp_size, inner_size, gradient_group):
    """Gradients have a group of their own where one spans the whole context-parallel group."""
    keys = {"cp exchange": cp_size - 1}
    for forward, backward in run_recorded("flat", cp_size=cp_size, inner_size=inner_size):
        assert transfers(forward) == Counter({"cp all_gather": 1, "cp assemble": 1} | keys)
        gradients = Counter({f"{gradient_group} exchange": cp_size - 1})
        assert transfers(backward) == Counter({"cp post_all_reduce": 1} | keys) + gradients


def test_the_first_kv_blocks_travel_while_the_keys_are_ranked(run_layer):
    """Two nodes of two, one agreement: ranking and packing run beside the first transfers, nothing is sent twice."""
    scoring = ["cp all_gather", "cp assemble", "cp all_reduce", "cp all_reduce"]
    first_transfers = ["outer exchange", "inner exchange"]
    ranking = ["cp all_to_all", "cp all_gather"]
    attention = ["pack", "cp assemble", "forward", "inner wait"]
    for log, _ in run_layer("hierarchical", cp_size=4, inner_size=2, calls=1):
        begun = [*scoring, *first_transfers, *ranking, *attention]
        assert log[: len(begun)] == begun


@pytest.mark.parametrize(("schedule", "inner_size"), [("flat", 4), ("hierarchical", 2), ("gather", 4), ("gather", 2)])
def test_selecting_beside_the_first_transfers_changes_no_bit(run_layer, schedule, inner_size):
    torch.manual_seed(0)
    one = run_layer(schedule, cp_size=4, inner_size=inner_size, calls=1)
    torch.manual_seed(0)
    two = run_layer(schedule, cp_size=4, inner_size=inner_size, calls=2)
    for (first_log, first), (second_log, second) in zip(one, two, strict=True):
        assert transfers(first_log) + Counter({"cp all_gather": 1}) == transfers(second_log)  # its own agreement
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_inference_mode():
    problem = random_problem(8, block_size=4, heads=(2, 1))
    with torch.inference_mode():
        inputs = [each.clone() for each in problem[:3]]
        out = sparse_attention(*inputs, CONFIG, layout=layout_of(problem, "striped", 1), groups=SoloTransport()).out
    assert torch.equal(out, sparse_attention(*problem[:3], CONFIG).out)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_exchanges_nothing(run_recorded, schedule):
    """What is left are operations that a group of one answers from its input."""
    ((forward, backward),) = run_recorded(schedule, cp_size=1, inner_size=1)
    assert not [entry for entry in forward + backward if "exchange" in entry]
    assert "cp all_gather" not in forward


def test_transfers_are_posted_before_what_hides_them(run_recorded):
    """Algorithm 2 on two nodes of two: outer transfer, inner loop, synchronise; gradients follow one step behind.

    Gradients that another rank waits for leave before those of queries are made. The other node's steps interrupt those
    on the own node, whose rest is computed while the other node's gradients travel there.
    """
    departure = ["outer exchange", "inner exchange"]
    inner_loop = ["inner exchange", "forward", "inner wait", "forward"]
    first_round = ["forward", *inner_loop[2:], "outer wait"]
    other_node = ["inner exchange", "backward", "inner wait", "backward", "inner_gradient exchange"]
    other_node += ["inner_gradient wait", "outer_gradient exchange", "queries"]
    for forward, backward in run_recorded("hierarchical", cp_size=4, inner_size=2):
        assert forward == ["cp all_gather", *departure, "pack", "cp assemble", *first_round, *inner_loop]
        assert backward == [
            "softmax_delta",
            *departure,
            *("backward", "cp post_all_reduce", "inner wait", "outer wait"),
            *other_node,
            *("backward", "inner_gradient exchange", "queries", "inner_gradient wait"),
            "outer_gradient wait",
            "cp wait",
            "unpack",
        ]


def test_gradients_travel_while_the_next_step_computes(run_recorded):
    """A flat ring of four: sums are posted in a step, before the gradients of its queries are made, and waited for only
    when the next one has its own; those of the last step travel under its queries.
    """
    for _, backward in run_recorded("flat", cp_size=4, inner_size=4):
        step, queries = "backward", "queries"
        shown = (step, queries)
        computed = [entry for entry in backward if entry in shown or entry.startswith("inner_gradient")]
        post, wait = "inner_gradient exchange", "inner_gradient wait"
        later = [step, wait, post, queries]
        assert computed == [step, step, post, queries, *later, *later, wait]


def test_what_a_node_gathers_travels_before_and_behind_the_computation(run_recorded):
    """A node of two: gathers are posted before the verticals are packed, the gradients reduced under the queries."""
    gathers, reduce = ["inner post_all_gather"] * 2, "inner_gradient post_reduce_scatter"
    for forward, backward in run_recorded("gather", cp_size=2, inner_size=2):
        arrived = ["inner wait"] * 2
        assert forward == ["cp all_gather", *gathers, "pack", "cp assemble", *arrived, "forward"]
        sent = ["backward", reduce, "cp post_all_reduce", "queries", "inner_gradient wait", "cp wait"]
        assert backward == ["softmax_delta", *gathers, *arrived, *sent, "unpack"]
