"""Every rank meets every rank's keys once, holds what it is said to hold, and sends nothing that nobody needs."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.config import SCHEDULES
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.ring import RingContext
from megatron_mtraining.ring.ring import NodeReduceScatter, RingReduction
from megatron_mtraining.ring.schedule import ring_schedule
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import RingGroups, resolve_transports
from megatron_mtraining.types import Documents

FACTORS = {
    kind: [(size, inner) for size in range(1, 65) for inner in range(1, size + 1) if size % inner == 0]
    for kind in SCHEDULES
}
FACTORS["flat"] = [(size, 1) for size in range(1, 65)]
"""(cp_size, inner_size): all of them, 1 x W, W x 1, 2 x 3 and 3 x 2 among them; ``flat`` knows one level only."""


def schedules(kind, cp_size, inner_size):
    """One for each rank."""
    return [ring_schedule(kind, cp_rank=rank, cp_size=cp_size, inner_size=inner_size) for rank in range(cp_size)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_each_rank_meets_each_source_once_and_its_own_first(kind):
    for cp_size, inner_size in FACTORS[kind]:
        for rank, schedule in enumerate(schedules(kind, cp_size, inner_size)):
            met = [source for step in schedule.source_ranks for source in step]
            assert sorted(met) == list(range(cp_size))
            assert rank in schedule.source_ranks[0]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_keys_in_hand_are_those_that_the_ranks_before_sent(kind):
    """Replays the transfers on rank numbers: an inner exchange in each sending step, an outer one in each round."""
    for cp_size, inner_size in FACTORS[kind]:
        plans = schedules(kind, cp_size, inner_size)
        inner_size = plans[0].inner_size
        current, outer, inner = list(range(cp_size)), None, None
        for number, step in enumerate(plans[0].steps):
            current = {"self": current, "outer": outer, "inner": inner}[step.arrives_from]
            for rank, plan in enumerate(plans):
                first = rank // inner_size * inner_size
                node = tuple(current[first : first + inner_size])
                assert plan.steps[number].source_ranks == (node if plan.gathers else (current[rank],))
            if step.sends_outer:
                outer = [current[rank - inner_size] for rank in range(cp_size)]
            if step.sends_inner:
                inner = [current[_neighbour(rank, inner_size)] for rank in range(cp_size)]


def _neighbour(rank, inner_size):
    """The rank before, inside its node."""
    node, place = divmod(rank, inner_size)
    return node * inner_size + (place - 1) % inner_size


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_backward_ends_on_the_own_node(kind):
    """The steps of a forward, each node's in order, and behind other nodes the rest of the own: two of its ranks' at
    least where it has as many.
    """
    for cp_size, inner_size in FACTORS[kind]:
        schedule = ring_schedule(kind, cp_rank=0, cp_size=cp_size, inner_size=inner_size)
        order, own = schedule.backward_order, len(schedule.steps) * schedule.inner_size // cp_size
        assert sorted(order) == list(range(len(order)))
        is_split = 1 < own < len(order)
        early = max(1, own // 3) if is_split else own
        assert order == (*range(early), *range(own, len(order)), *range(early, own))
        assert [step.is_last for step in schedule.backward_steps] == [False] * (len(order) - 1) + [True]
        origins = [step.arrives_from for step in schedule.backward_steps]
        assert origins.count("held") == is_split
        assert not is_split or origins[len(order) - own + early] == "held"


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_last_step_sends_nothing(kind):
    for cp_size, inner_size in FACTORS[kind]:
        schedule = ring_schedule(kind, cp_rank=cp_size // 2, cp_size=cp_size, inner_size=inner_size)
        num_nodes = cp_size // schedule.inner_size
        assert [step.sends_outer for step in schedule.steps].count(True) == num_nodes - 1
        assert [step.ends_node for step in schedule.steps].count(True) == num_nodes
        assert [step.is_last for step in schedule.steps] == [False] * (len(schedule.steps) - 1) + [True]
        for step, following in zip(schedule.steps, (*schedule.steps[1:], None), strict=True):
            assert step.sends_inner == (not step.ends_node)
            assert following is None or following.arrives_from == ("outer" if step.ends_node else "inner")
        assert not (schedule.steps[-1].sends_outer and schedule.steps[-1].ends_node)


def test_six_ranks_as_two_nodes_of_three():
    schedule = ring_schedule("hierarchical", cp_rank=4, cp_size=6, inner_size=3)
    assert schedule.source_ranks == ((4,), (3,), (5,), (1,), (0,), (2,))
    assert ring_schedule("gather", cp_rank=4, cp_size=6, inner_size=3).source_ranks == ((3, 4, 5), (0, 1, 2))
    assert ring_schedule("flat", cp_rank=4, cp_size=6, inner_size=3).source_ranks == (
        (4,),
        (3,),
        (2,),
        (1,),
        (0,),
        (5,),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_ring_sums_arrive_home(size):
    """Rank r contributes 100 * r + source to each source: the sum over r is known."""

    def body(ring):
        ring_sum = RingReduction(ring)
        ring_sum.set_own(torch.tensor([101.0 * ring.rank]))
        for step in range(1, size):
            ring_sum.add(torch.tensor([100.0 * ring.rank + (ring.rank - step) % size]))
        return ring_sum.total().item()

    assert RankSimulator(size).run(body) == [100 * size * (size - 1) / 2 + size * rank for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gathered_sums_arrive_home(size):
    """Two batch rows, two tokens of each rank end to end: token t of row b gets (r + 1) * (10 * b + t) from rank r."""

    def body(group):
        sums = NodeReduceScatter(group)
        tokens = torch.tensor([0.0, 10.0])[:, None] + torch.arange(2.0 * size)
        sums.add((group.rank + 1) * torch.stack([tokens, -tokens])[..., None, None])
        return sums.total().squeeze()

    weight = size * (size + 1) / 2
    for rank, total in enumerate(RankSimulator(size).run(body)):
        own = weight * torch.tensor([[2.0 * rank, 2.0 * rank + 1], [2.0 * rank + 10, 2.0 * rank + 11]])
        assert torch.equal(total, torch.stack([own, -own]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "star"}, "schedule must be one of hierarchical, flat, gather, got 'star'."),
        ({"cp_rank": 6}, r"cp_rank must be in \[0, 6\), got 6."),
        ({"inner_size": 4}, "inner_size must be a divisor of the context-parallel size 6, got 4."),
    ],
)
def test_refusals(changes, sentence):
    arguments = {"kind": "hierarchical", "cp_rank": 0, "cp_size": 6, "inner_size": 3} | changes
    with pytest.raises(ValueError, match=sentence):
        ring_schedule(arguments.pop("kind"), **arguments)


def test_layers_and_steps_with_the_same_blocks_have_the_same_geometry():
    """What a backend makes of a geometry it may find again by its identity, however long the sequence."""

    def context(cp_rank, documents):
        layout = SequenceLayout("striped", seq_len=48, cp_size=3, block_size=4)  # equal, and another object
        (group,) = (each for each in ranks if each.rank == cp_rank)
        schedule = ring_schedule("flat", cp_rank=cp_rank, cp_size=3, inner_size=3)
        options = {"schedule": schedule, "backend": None, "softmax_scale": 1.0}
        groups = resolve_transports(RingGroups(cp=group), "flat")
        return RingContext(layout=layout, documents=documents, groups=groups, **options)

    ranks = RankSimulator(3).run(lambda group: group)
    for documents in (None, Documents((0, 20, 48))):
        first, second = context(1, documents), context(1, documents)
        assert first.own_geometry is second.geometry((1,))
        assert first.geometry((0, 2)) is second.geometry((0, 2))
        assert first.geometry((0, 2)).documents == documents
        assert first.geometry((0,)).key_blocks.tolist() == [0, 3, 6, 9]
        assert context(2, documents).geometry((0,)).query_blocks.tolist() == [2, 5, 8, 11]
