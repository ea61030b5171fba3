"""Drawn layouts: every block where the layout's own sentence puts it, and every token at its place."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from megatron_mtraining.layout import SequenceLayout, gather_sequence, shard_sequence, token_positions
from megatron_mtraining.megatron.documents import positions_in_documents
from megatron_mtraining.megatron.split import TokenSplit
from tests.draws import bounds, examples, layouts


def owner(layout: SequenceLayout, block: int) -> int:
    """The rank of one block, as :class:`SequenceLayout` says it in words."""
    size, kind = layout.cp_size, layout.kind
    turn, number = divmod(block, size)
    if kind == "contiguous":
        return next(rank for rank in range(size) if block < (rank + 1) * layout.num_blocks // size)
    if kind == "zigzag":
        chunk = next(i for i in range(2 * size) if block < (i + 1) * layout.num_blocks // (2 * size))
        return min(chunk, 2 * size - 1 - chunk)
    if kind == "rotated":
        return (block + sum(range(turn + 1))) % size
    if kind == "node_striped" and layout.node_size > 1:  # else it is striped
        num_nodes = size // layout.node_size
        place, node = divmod(number, num_nodes)
        return (node + turn // layout.node_size) % num_nodes * layout.node_size + place
    return number


@given(layout=layouts(most_ranks=40, most_tokens=1000), data=st.data())
@examples(30)
def test_blocks_and_tokens(layout, data):
    if layout.cp_size > 1:
        assert layout.owners().tolist() == [owner(layout, block) for block in range(layout.num_blocks)]
    places = [token_positions(layout, cp_rank=rank) for rank in range(layout.cp_size)]
    of_block = layout.owners().repeat_interleave(layout.block_size)[: layout.seq_len]
    assert all(torch.equal(held, (of_block == rank).nonzero().flatten()) for rank, held in enumerate(places))
    assert torch.equal(layout.blocks_by_rank()[layout.owners(), layout.slots()], torch.arange(layout.num_blocks))
    dim = data.draw(st.integers(-3, 2))
    whole = torch.randn(2, 3, layout.seq_len).movedim(-1, dim)
    parts = [shard_sequence(whole, layout, cp_rank=rank, dim=dim) for rank in range(layout.cp_size)]
    for part, held in zip(parts, places, strict=True):
        assert torch.equal(part.movedim(dim, 0), whole.movedim(dim, 0)[held])
    assert torch.equal(gather_sequence(parts, layout, dim=dim), whole)


@given(layout=layouts(most_ranks=12, most_tokens=300), data=st.data())
@examples(30)
def test_splits(layout, data):
    split = TokenSplit(layout.kind, layout.block_size, layout.node_size or 1)
    places = [token_positions(layout, cp_rank=rank) for rank in range(layout.cp_size)]
    where = (layout.seq_len, layout.cp_size, torch.device("cpu"))
    assert torch.equal(split.rank_order(*where), torch.cat(places))
    assert torch.equal(split.sequence_order(*where)[torch.cat(places)], torch.arange(layout.seq_len))
    assert torch.equal(split.blocks_by_rank(*where), layout.blocks_by_rank())
    cuts = data.draw(bounds(layout.seq_len, layout.block_size))
    in_document = torch.cat([torch.arange(stop - start) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)])
    for rank, held in enumerate(places):
        positions = split.positions(layout.seq_len, layout.cp_size, rank, torch.device("cpu"))
        assert torch.equal(positions, held)
        assert torch.equal(positions_in_documents(positions, torch.tensor(cuts, dtype=torch.int32)), in_document[held])
