"""Counted pairs and recall of drawn indices are those of the dense mask: by list, by ranks, by ring step."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from megatron_mtraining.layout import SequenceLayout, shard_sequence, token_positions
from megatron_mtraining.metrics import (
    attention_recall,
    computed_pairs_of_lists,
    kept_pairs,
    pairs_by_owner,
    rank_pairs,
    ring_work,
)
from megatron_mtraining.planner import RingShape
from megatron_mtraining.ring import ring_schedule
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.types import AttentionIndex, BlockListIndex, VerticalSlashIndex
from tests.draws import SEEDS, Ring, examples, index_of_kinds, kinds_of_lists, packs, rings, spans_of
from tools.balance.owner_pairs import owner_pairs_of_ranks

from .attention_inputs import as_cu_seqlens, random_inputs
from .metrics_cases import with_garbage


@st.composite
def rings_and_packs(draw: Callable) -> tuple[Ring, tuple[int, ...] | None]:
    ring = draw(rings())
    return ring, draw(packs(ring.layout.seq_len, ring.layout.block_size))


@given(seed=SEEDS, drawn=rings_and_packs(), kinds=kinds_of_lists, num_lists=st.integers(1, 3))
@examples(8)
def test_pairs_of_distances(seed, drawn, kinds, num_lists):
    random.seed(seed)
    torch.manual_seed(seed)
    ring, cuts = drawn
    layout, options = ring.layout, {"cu_seqlens": as_cu_seqlens(cuts)}
    spans = spans_of(cuts, batch=2, seq_len=layout.seq_len)
    sizes = {"seq_len": layout.seq_len, "block_size": layout.block_size, "stride": layout.cp_size}
    index = with_garbage(index_of_kinds(kinds, spans, num_lists, **sizes))
    without_verticals = VerticalSlashIndex(
        index.vertical, torch.zeros_like(index.num_vertical), index.slash, index.num_slash, index.block_size
    )
    kept, slash = (allowed_mask(each, seq_len=layout.seq_len, **options) for each in (index, without_verticals))
    by_list = [kept[row if cuts is None else 0, :, slice(*span)].sum((1, 2)) for row, span in enumerate(spans)]
    assert torch.equal(kept_pairs(index, seq_len=layout.seq_len, **options), torch.stack(by_list))
    pairs = owner_pairs_of_ranks(index, layout, **options)
    assert torch.equal(pairs.slash, by_ranks(slash, layout))
    assert torch.equal(pairs.vertical, by_ranks(kept & ~slash, layout))
    check_ring_work(ring, index, slash, kept & ~slash, options)
    check_recall(layout, [index] * layout.cp_size, kept, options)


def by_ranks(mask: Tensor, layout: SequenceLayout) -> Tensor:
    """int64 ``[cp_size, cp_size]``: true entries of ``[..., seq, seq]`` by the ranks of query and key."""
    held = [token_positions(layout, cp_rank=rank) for rank in range(layout.cp_size)]
    return torch.tensor([[int(mask[..., queries, :][..., keys].sum()) for keys in held] for queries in held])


def check_ring_work(ring: Ring, index: VerticalSlashIndex, slash: Tensor, vertical: Tensor, options: dict) -> None:
    """What each rank computes in each step: in telemetry, and as the planner replays it."""
    cp_size, inner_size = ring.layout.cp_size, ring.inner_size or ring.layout.cp_size
    ranks = {"cp_size": cp_size, "inner_size": inner_size}
    sources = [ring_schedule(ring.schedule, cp_rank=rank, **ranks).source_ranks for rank in range(cp_size)]
    met = by_ranks(slash, ring.layout)
    steps = [[int(met[rank, list(step)].sum()) for step in own] for rank, own in enumerate(sources)]
    shape = RingShape(kind=ring.schedule, cp_size=cp_size, node_size=inner_size)
    for work in (
        ring_work(index, ring.layout, sources, **options),
        shape.work(*rank_pairs(index, ring.layout, **options)),
    ):
        assert work.slash.tolist() == steps
        assert torch.equal(work.vertical, by_ranks(vertical, ring.layout).sum(1))


def check_recall(layout: SequenceLayout, indices: list[AttentionIndex], kept: Tensor, options: dict) -> None:
    """Each rank finds what share of dense attention ``kept`` ``[batch, lists, seq, seq]`` has, two heads a list."""
    batch, num_lists, seq_len, _ = kept.shape
    query, key, _ = random_inputs(batch, seq_len, 2 * num_lists, num_lists, 3)
    rows = sorted(random.sample(range(seq_len), random.randint(1, seq_len)))

    def body(group):
        local = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key))
        return attention_recall(*local, indices[group.rank], rows=rows, layout=layout, groups=group, **options)

    num_rows = batch if options["cu_seqlens"] is None else len(options["cu_seqlens"]) - 1
    everything = VerticalSlashIndex.dense(rows=num_rows, num_heads=1, seq_len=seq_len, block_size=indices[0].block_size)
    visible = allowed_mask(everything, seq_len=seq_len, **options)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(2, 2)) * 3**-0.5
    probability = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    expected = (probability * kept.repeat_interleave(2, 1)).sum(-1)[..., rows]
    for recall in RankSimulator(layout.cp_size, timeout=300.0).run(body):
        torch.testing.assert_close(recall, expected, rtol=0, atol=1e-12)


@given(
    seed=SEEDS,
    drawn=rings_and_packs(),
    num_lists=st.integers(1, 3),
    chunk_blocks=st.integers(1, 5),
    has_masks=st.booleans(),
)
@examples(8)
def test_pairs_of_lists(seed, drawn, num_lists, chunk_blocks, has_masks):
    random.seed(seed)
    torch.manual_seed(seed)
    layout, cuts = drawn[0].layout, drawn[1]
    num_chunks, batch = -(-layout.num_blocks // chunk_blocks), 1 if cuts is not None else 2
    lists = [
        [sorted(random.sample(range(num_chunks), random.randint(0, num_chunks))) for _ in range(layout.num_blocks)]
        for _ in range(batch * num_lists)
    ]
    masks = [[[random.getrandbits(64) for _ in chunks] for chunks in head] for head in lists]

    def index_of(blocks: Tensor) -> BlockListIndex:
        """The lists of some query blocks."""
        chosen, rows = (
            [[[table[head][block] for block in blocks.tolist()] for head in range(first, first + num_lists)]
             for first in range(0, batch * num_lists, num_lists)]
            for table in (lists, masks)
        )  # fmt: skip
        sizes = {"chunk_blocks": chunk_blocks, "block_size": layout.block_size, "query_blocks": blocks}
        return BlockListIndex.from_lists(chosen, rows if has_masks else None, **sizes)

    options = {"cu_seqlens": as_cu_seqlens(cuts)}
    kept = allowed_mask(index_of(torch.arange(layout.num_blocks)), seq_len=layout.seq_len, **options)
    indices = [index_of(layout.blocks(rank)) for rank in range(layout.cp_size)]
    for rank, index in enumerate(indices):
        held = token_positions(layout, cp_rank=rank)
        assert torch.equal(
            computed_pairs_of_lists(index, layout, cp_rank=rank, **options), kept[:, :, held].sum((2, 3))
        )
        assert torch.equal(pairs_by_owner(index, layout, cp_rank=rank, **options), by_ranks(kept, layout)[rank])
    check_recall(layout, indices, kept, options)
