"""How often a call communicates, in which group and in which order: exact counts, and Algorithm 2 as a log."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mtraining import attention as attention_module
from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.config import SCHEDULES, MTrainingConfig
from megatron_mtraining.errors import RankMismatchError
from megatron_mtraining.layout import shard_sequence
from megatron_mtraining.selection import select_vertical_slash
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import SoloTransport

from .cases import group_arguments, layout_of, random_problem
from .recording import RecordingBackend, RecordingTransport, recording_groups, start_log


@pytest.fixture
def run_recorded(monkeypatch):
    """Runs forward and backward on every rank; gives each rank's two logs."""
    monkeypatch.setattr(attention_module, "resolve_backend", lambda *_, **__: RecordingBackend())

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


CONFIG = MTrainingConfig(
    window=4, sink_tokens=2, local_blocks=1, max_vertical=4, max_slash=2, dense_below=0, block_size=4
)


@pytest.fixture
def run_layer(monkeypatch):
    """Selects and attends on every rank, with keys that set off before or not; gives each rank's log and results."""
    monkeypatch.setattr(attention_module, "resolve_backend", lambda *_, **__: RecordingBackend())

    def run(schedule, *, cp_size, inner_size, early):
        problem = random_problem(cp_size * 8, block_size=4, heads=(2, 1))
        layout = layout_of(problem, "striped", cp_size)

        def body(group):
            inputs = [shard_sequence(each, layout, cp_rank=group.rank, dim=1).requires_grad_() for each in problem[:3]]
            groups = group_arguments(recording_groups(group.ring_groups(inner_size)))
            ring = {"cp_group": RecordingTransport("cp", group), "schedule": schedule, **groups}
            log = start_log()
            start = start_ring(*inputs[1:], **ring) if early else None
            index = select_vertical_slash(
                *inputs[:2], CONFIG, layout=layout, cp_group=ring["cp_group"], meanwhile=start and start.post
            )
            out = ring_module.ring_attention(*inputs, index, layout=layout, start=start, **ring).out
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


def test_keys_set_off_when_they_have_been_scored(run_layer):
    """Two nodes of two: ranking, agreement and packing run beside the first transfers, and nothing is sent twice."""
    scoring = ["cp all_gather", "cp assemble", "cp all_reduce", "cp all_reduce"]
    departure = ["outer exchange", "inner exchange"]
    ranking = ["cp all_to_all", "cp all_gather"]
    attention = ["cp all_gather", "pack_vertical", "cp assemble", "forward", "inner wait"]
    for log, _ in run_layer("hierarchical", cp_size=4, inner_size=2, early=True):
        begun = [*scoring, *departure, *ranking, *attention]
        assert log[: len(begun)] == begun


@pytest.mark.parametrize(("schedule", "inner_size"), [("flat", 4), ("hierarchical", 2), ("gather", 4), ("gather", 2)])
def test_setting_off_early_changes_no_bit(run_layer, schedule, inner_size):
    torch.manual_seed(0)
    early = run_layer(schedule, cp_size=4, inner_size=inner_size, early=True)
    torch.manual_seed(0)
    late = run_layer(schedule, cp_size=4, inner_size=inner_size, early=False)
    for (first_log, first), (second_log, second) in zip(early, late, strict=True):
        assert transfers(first_log) == transfers(second_log)
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def started_alone() -> tuple[tuple[Tensor, Tensor, Tensor], RingStart, dict[str, Any]]:
    """Query, key and value of a single rank, a start of them, and what a call that goes on from it takes besides."""
    problem = random_problem(8, block_size=4, heads=(2, 1))
    ring = {"cp_group": SoloTransport(), "schedule": "hierarchical"}
    query, key, value = problem[:3]
    start = start_ring(key, value, **ring)
    call = {"index": problem.index, "layout": layout_of(problem, "striped", 1), "start": start, **ring}
    return (query, key, value), start, call


def test_a_start_is_of_one_call():
    (query, key, value), _, call = started_alone()
    for wrong in ({"key": key.clone()}, {"schedule": "flat"}, {"cp_group": SoloTransport(1)}):
        with pytest.raises(ValueError, match="start must be made of the key, value, groups and schedule of this call"):
            ring_attention(query, **{"key": key, "value": value, **call, **wrong})
    ring_attention(query, key, value, **call)
    with pytest.raises(ValueError, match="start must be made of .* and of no other call"):
        ring_attention(query, key, value, **call)


def test_keys_that_were_written_to_after_they_set_off_are_refused():
    """Other ranks have what was there before, and the backward would send what is there now."""
    (query, key, value), start, call = started_alone()
    key.mul_(2)  # nothing has been sent yet
    start.post()
    value.mul_(2)
    with pytest.raises(ValueError, match="key and value must be left as they were when start.post sent them"):
        ring_attention(query, key, value, **call)


def test_a_start_posts_once():
    """A second post would leave a transfer that nobody waits for, and the ranks' next keys would be another's."""
    given, start, call = started_alone()
    start.post()
    with pytest.raises(ValueError, match="start must be posted once, before .* got one that was posted before"):
        start.post()
    ring_attention(*given, **call)
    with pytest.raises(ValueError, match="start must be posted once, before .* got one that a call has used"):
        start.post()


def test_keys_set_off_on_every_rank_or_none():
    """Else a rank would meet the others' gather of keys with another collective, and wait for ever."""
    problem = random_problem(24, block_size=4, heads=(2, 1))
    layout = layout_of(problem, "striped", 3)

    def body(group):
        query, key, value = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in problem[:3])
        start = start_ring(key, value, cp_group=group)
        meanwhile = start.post if group.rank < 2 else None
        with pytest.raises(RankMismatchError, match="meanwhile must be the same .* got another value on rank 2"):
            select_vertical_slash(query, key, CONFIG, layout=layout, cp_group=group, meanwhile=meanwhile)
        if meanwhile is not None:
            meanwhile()
        with pytest.raises(RankMismatchError, match="start must be the same .* got another value on rank 2"):
            ring_attention(query, key, value, problem.index, layout=layout, cp_group=group, start=start)

    RankSimulator(3).run(body)


def test_a_start_is_taken_in_inference_mode():
    problem = random_problem(8, block_size=4, heads=(2, 1))
    layout, ring = layout_of(problem, "striped", 1), {"cp_group": SoloTransport(), "schedule": "hierarchical"}
    with torch.inference_mode():
        query, key, value = (each.clone() for each in problem[:3])
        start = start_ring(key, value, **ring)
        start.post()
        ring_attention(query, key, value, problem.index, layout=layout, start=start, **ring)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.zeros(1, 8, 2, 4), r"value.shape must be \(1, 8, 1, 4\) as key has, got \(1, 8, 2, 4\)"),
        (torch.zeros(1, 8, 1, 4).double(), "value must be of torch.float32 on cpu as key is, got torch.float64 on cpu"),
    ],
)
def test_values_that_cannot_travel_with_the_keys_are_refused_before_anything_is_sent(value, sentence):
    with pytest.raises(ValueError, match=sentence):
        start_ring(torch.zeros(1, 8, 1, 4), value, cp_group=SoloTransport())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_exchanges_nothing(run_recorded, schedule):
    """What is left are operations that a group of one answers from its input."""
    ((forward, backward),) = run_recorded(schedule, cp_size=1, inner_size=1)
    assert not [entry for entry in forward + backward if "exchange" in entry]
    assert "cp all_gather" not in forward


def test_transfers_are_posted_before_what_hides_them(run_recorded):
    """Algorithm 2 on two nodes of two: outer transfer, inner loop, synchronise; gradients follow one step behind.

    Gradients that another rank waits for leave before those of queries are made; in the last step to the other node.
    """
    departure = ["outer exchange", "inner exchange"]
    inner_loop = ["inner exchange", "slash_forward", "inner wait", "slash_forward"]
    first_round = ["forward", *inner_loop[2:], "outer wait"]
    inner_back = ["inner exchange", "slash_backward", "inner wait", "slash_backward", "inner_gradient exchange"]
    first_back = ["backward", "cp post_all_reduce", *inner_back[2:], "queries", "inner_gradient wait", "outer wait"]
    for forward, backward in run_recorded("hierarchical", cp_size=4, inner_size=2):
        assert forward == ["cp all_gather", *departure, "pack_vertical", "cp assemble", *first_round, *inner_loop]
        assert backward == [
            "softmax_delta",
            *departure,
            *first_back,
            *inner_back,
            "inner_gradient wait",
            "outer_gradient exchange",
            "queries",
            "outer_gradient wait",
            "cp wait",
            "unpack_vertical_grad",
        ]


def test_gradients_travel_while_the_next_step_computes(run_recorded):
    """A flat ring of four: sums are posted in a step, before the gradients of its queries are made, and waited for only
    when the next one has its own; those of the last step travel under its queries.
    """
    for _, backward in run_recorded("flat", cp_size=4, inner_size=4):
        first, step, queries = "backward", "slash_backward", "queries"
        shown = (first, step, queries)
        computed = [entry for entry in backward if entry in shown or entry.startswith("inner_gradient")]
        post, wait = "inner_gradient exchange", "inner_gradient wait"
        later = [step, wait, post, queries]
        assert computed == [first, step, post, queries, *later, *later, wait]


def test_what_a_node_gathers_travels_before_and_behind_the_computation(run_recorded):
    """A node of two: gathers are posted before the verticals are packed, the gradients reduced under the queries."""
    gathers, reduce = ["inner post_all_gather"] * 2, "inner_gradient post_reduce_scatter"
    for forward, backward in run_recorded("gather", cp_size=2, inner_size=2):
        arrived = ["inner wait"] * 2
        assert forward == ["cp all_gather", *gathers, "pack_vertical", "cp assemble", *arrived, "forward"]
        sent = ["backward", reduce, "cp post_all_reduce", "queries", "inner_gradient wait", "cp wait"]
        assert backward == ["softmax_delta", *gathers, *arrived, *sent, "unpack_vertical_grad"]
