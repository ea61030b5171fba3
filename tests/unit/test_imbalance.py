"""Work per rank and step equals a count over the dense mask; the two imbalances are what their definitions say."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.config import LAYOUTS
from megatron_mtraining.layout import SequenceLayout, token_positions
from megatron_mtraining.metrics import RingWork, computed_pairs, ring_work
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.types import VerticalSlashIndex
from tests.layouts import node_size_of

from .attention_inputs import as_cu_seqlens
from .metrics_cases import random_index, with_garbage


def flat_ring(cp_size):
    """Rank r meets r, r - 1, ... in turn."""
    return [[((rank - step) % cp_size,) for step in range(cp_size)] for rank in range(cp_size)]


def gathered(cp_size):
    """Every rank meets all keys at once."""
    return [[tuple(range(cp_size))] for _ in range(cp_size)]


def counted(index, layout, sources, cu_seqlens):
    """(slash, vertical) pairs off dense masks; a pair that is both is a slash's."""
    only_slashes = VerticalSlashIndex(
        index.vertical, torch.zeros_like(index.num_vertical), index.slash, index.num_slash, index.block_size
    )
    options = {"seq_len": layout.seq_len, "cu_seqlens": cu_seqlens}
    all_pairs, slash_pairs = (allowed_mask(each, **options).sum((0, 1)) for each in (index, only_slashes))
    held = [token_positions(layout, cp_rank=rank) for rank in range(layout.cp_size)]
    slash = [
        [sum(int(slash_pairs[held[rank]][:, held[source]].sum()) for source in step) for step in sources[rank]]
        for rank in range(layout.cp_size)
    ]
    return slash, [int((all_pairs - slash_pairs)[own].sum()) for own in held]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", [flat_ring, gathered])
@pytest.mark.parametrize("bounds", [None, [0, 9, 9, 10, 61, 96]])
def test_work_equals_the_mask(kind, cp_size, schedule, bounds):
    layout = SequenceLayout(kind, seq_len=96, cp_size=cp_size, block_size=4, node_size=node_size_of(cp_size))
    index = random_index(96, 4, bounds)
    work = ring_work(index, layout, schedule(cp_size), cu_seqlens=as_cu_seqlens(bounds))
    slash, vertical = counted(index, layout, schedule(cp_size), as_cu_seqlens(bounds))
    assert work.slash.tolist() == slash
    assert work.vertical.tolist() == vertical


@pytest.mark.parametrize("bounds", [None, [0, 9, 9, 10, 61, 96]])
def test_entries_behind_the_counts_are_no_work(bounds):
    layout = SequenceLayout("rotated", seq_len=96, cp_size=3, block_size=4)
    index = random_index(96, 4, bounds)
    works = [
        ring_work(each, layout, flat_ring(3), cu_seqlens=as_cu_seqlens(bounds)) for each in (with_garbage(index), index)
    ]
    assert torch.equal(works[0].slash, works[1].slash)
    assert torch.equal(works[0].vertical, works[1].vertical)


def test_a_short_last_block_on_one_rank():
    index = random_index(77, 8, None)
    work = ring_work(index, SequenceLayout("striped", seq_len=77, cp_size=1, block_size=8), flat_ring(1))
    assert int(work.slash.sum() + work.vertical.sum()) == int(computed_pairs(index, seq_len=77).sum())
    assert work.worker_imbalance == work.step_imbalance == 1.0


def test_definitions():
    work = RingWork(torch.tensor([[4, 0], [2, 6]]), torch.tensor([2, 0]))
    # Totals 6 and 8, mean 7; the steps last max(4 + 2, 2) and max(0, 6).
    assert work.worker_imbalance == pytest.approx(8 / 7)
    assert work.step_imbalance == pytest.approx(12 / 7)


def test_a_slash_at_a_multiple_of_the_ranks_falls_into_one_step_unless_rotated():
    """Distances 8, 16 and 24 of 8 ranks: striped meets them all at home, rotated spreads them."""
    num_blocks, cp_size = 64, 8
    index = VerticalSlashIndex.from_lists([[[]]], [[[0, 8, 16, 24]]], seq_len=4 * num_blocks, block_size=4)
    works = {
        kind: ring_work(
            index, SequenceLayout(kind, seq_len=4 * num_blocks, cp_size=cp_size, block_size=4), flat_ring(cp_size)
        )
        for kind in ("striped", "rotated")
    }
    assert works["striped"].slash[:, 1:].sum() == 0
    assert (works["rotated"].slash.sum(0) > 0).sum() > 2
    assert works["striped"].slash.sum() == works["rotated"].slash.sum()


def test_sixty_four_ranks():
    layout = SequenceLayout("rotated", seq_len=64 * 64 * 4, cp_size=64, block_size=4)
    index = random_index(layout.seq_len, 4, None, num_heads=1, rows=1)
    work = ring_work(index, layout, flat_ring(64))
    assert int(work.slash.sum() + work.vertical.sum()) == int(computed_pairs(index, seq_len=layout.seq_len).sum())


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ([[(0,), (1,)]], r"source_ranks must be one schedule for each of 2 ranks, got 1 schedules\."),
        ([[(0,), (1,)], [(1,)]], r"source_ranks\[1\] must be every rank below 2 once, got \[1\]\."),
    ],
)
def test_schedules_that_miss_keys_are_refused(sources, sentence):
    layout = SequenceLayout("striped", seq_len=64, cp_size=2, block_size=8)
    with pytest.raises(ValueError, match=sentence):
        ring_work(random_index(64, 8, None), layout, sources)


def test_another_block_size_is_refused():
    layout = SequenceLayout("striped", seq_len=64, cp_size=2, block_size=4)
    with pytest.raises(ValueError, match=r"layout\.block_size must be the index's 8, got 4\."):
        ring_work(random_index(64, 8, None), layout, flat_ring(2))
