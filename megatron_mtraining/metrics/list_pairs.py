"""Exact count of the pairs of one rank's block lists: by list, and by the rank of the key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import invalid
from ..layout import SequenceLayout, blocks_of
from ..tensors import to_device
from ..types import BlockListIndex
from .density import spans_of

_BLOCKS_AT_ONCE = 2**20
_ROWS_AT_ONCE = 2**23


def computed_pairs_of_lists(
    index: BlockListIndex,
    layout: SequenceLayout,
    *,
    cp_rank: int,
    cu_seqlens: Tensor | None = None,
    num_valid: Tensor | None = None,
) -> Tensor:
    """int64 ``[rows, num_lists]``: pairs of this rank's queries and one head by each list. The host does not wait.

    Args:
        index: the lists of this rank.
        layout: which rank holds which block.
        cp_rank: this rank.
        cu_seqlens: int32 ``[documents + 1]`` on the CPU, for packed documents.
        num_valid: on the CPU, as selection takes it: the pairs of padding do not count.
    """
    blocks = _QueryBlocks.of(index, layout, cp_rank, cu_seqlens, num_valid)
    pairs = torch.zeros(index.rows * index.num_lists, dtype=torch.int64, device=index.device)
    chunk_len = index.chunk_blocks * index.block_size
    for of_list, slot, entries in _entries(index, _ROWS_AT_ONCE // index.block_size):
        first = index.chunks[entries].long() * chunk_len
        masks = None if index.row_masks is None else index.row_masks[entries]
        block_row = blocks.block_rows(slot, of_list // index.num_lists)
        pairs.index_add_(0, of_list, blocks.pairs_by_row(block_row, first, first + chunk_len, masks))
    return pairs.view(index.rows, index.num_lists)


def pairs_by_owner(
    index: BlockListIndex, layout: SequenceLayout, *, cp_rank: int, cu_seqlens: Tensor | None = None
) -> Tensor:
    """int64 ``[cp_size]``: pairs of this rank's queries, over all lists, by the rank that holds the key.

    Waits for the device.
    """
    blocks = _QueryBlocks.of(index, layout, cp_rank, cu_seqlens)
    owners = to_device(layout.owners(), index.device)
    pairs = torch.zeros(layout.cp_size, dtype=torch.int64, device=index.device)
    inside, size = torch.arange(index.chunk_blocks, device=index.device), index.block_size
    for _, slot, entries in _entries(index, _BLOCKS_AT_ONCE // index.chunk_blocks):
        block = index.chunks[entries].long().unsqueeze(-1) * index.chunk_blocks + inside
        slot, masks = slot.unsqueeze(-1).expand_as(block), None
        if index.row_masks is not None:
            masks = index.row_masks[entries].unsqueeze(-1).expand_as(block).flatten()
        first = block.flatten() * size
        owner = owners[block.clamp(max=layout.num_blocks - 1).flatten()]
        pairs.index_add_(0, owner, blocks.pairs(slot.flatten(), first, first + size, masks))
    return pairs


def rank_lists(index: BlockListIndex, layout: SequenceLayout, *, cp_rank: int) -> BlockListIndex:
    """Return the lists of one rank's query blocks, of an index of all blocks. Waits for the device.

    Args:
        index: as one device selects it, with the lists of blocks 0, 1, 2, ...
        layout: which rank holds which block.
        cp_rank: the rank.

    Raises:
        ValueError: the index has not the lists of the layout's blocks.
    """
    if layout.block_size != index.block_size:
        raise invalid("layout.block_size", f"the index's {index.block_size}", layout.block_size)
    if not torch.equal(index.query_blocks, torch.arange(layout.num_blocks, device="cpu")):
        found = f"{index.num_query_blocks} lists of blocks {index.query_blocks[:4].tolist()}..."
        raise invalid("index.query_blocks", f"the {layout.num_blocks} blocks of the layout in order", found)
    blocks = blocks_of(layout, cp_rank)
    return index.of_lists(index.numbers[..., to_device(blocks, index.device)], blocks)


def entry_slots(index: BlockListIndex) -> tuple[Tensor, Tensor]:
    """int64 ``[entries]``: the list of each entry, ``row * num_lists + list``, and its query block's slot."""
    counts = index.starts.diff(dim=-1).flatten().long()
    of_block = torch.repeat_interleave(counts, output_size=index.chunks.numel())
    return of_block // index.num_query_blocks, of_block % index.num_query_blocks


def _entries(index: BlockListIndex, at_once: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield list, slot and range of some entries at a time."""
    of_list, slot = entry_slots(index)
    at_once = max(1, at_once)
    for first in range(0, index.chunks.numel(), at_once):
        entries = slice(first, first + at_once)
        yield of_list[entries], slot[entries], entries


@dataclass(frozen=True, slots=True)
class _QueryBlocks:
    """The rows of each of this rank's query blocks, once for all batch rows or for each of them."""

    position: Tensor
    """int64 ``[block rows, block_size]``."""

    first_key: Tensor
    """int64 ``[block rows, block_size]``: first token of each row's document; behind all keys for other rows."""

    num_slots: int
    """Query blocks of a batch row, of which each has its own rows where there are more."""

    @classmethod
    def of(
        cls,
        index: BlockListIndex,
        layout: SequenceLayout,
        cp_rank: int,
        cu_seqlens: Tensor | None,
        num_valid: Tensor | None = None,
    ) -> _QueryBlocks:
        size, seq_len = index.block_size, layout.seq_len
        position = blocks_of(layout, cp_rank).unsqueeze(-1) * size + torch.arange(size, device="cpu")
        first_key, end = torch.zeros_like(position), torch.full_like(position, seq_len)
        spans = spans_of(index.rows, seq_len=seq_len, cu_seqlens=cu_seqlens, num_valid=num_valid)
        starts, ends = torch.tensor(spans, device="cpu").unbind(1)
        if cu_seqlens is not None:
            document = torch.searchsorted(starts, position, right=True) - 1
            first_key, end = starts[document], ends[document]
        elif num_valid is not None:
            position, end = position.repeat(len(ends), 1), ends.repeat_interleave(len(position)).unsqueeze(-1)
            first_key = torch.zeros_like(position)
        first_key = first_key.masked_fill(position >= end, seq_len + size)
        return cls(to_device(position, index.device), to_device(first_key, index.device), index.num_query_blocks)

    def block_rows(self, slot: Tensor, row: Tensor) -> Tensor:
        """int64: rows of the blocks of a slot of a batch row."""
        return slot + row * self.num_slots if len(self.position) > self.num_slots else slot

    def pairs(self, slot: Tensor, first: Tensor, stop: Tensor, masks: Tensor | None) -> Tensor:
        """Count as :meth:`pairs_by_row` does. Waits for the device, to look at the rows of few entries only."""
        size = self.position.shape[1]
        is_whole = (stop <= self.position[slot, 0]) & (self.first_key.amax(1)[slot] <= first)
        rows = torch.full_like(slot, size) if masks is None else _count_bits(masks, size)
        pairs = rows * (stop - first)
        edges = (~is_whole).nonzero().squeeze(-1)
        of_edges = (slot[edges], first[edges], stop[edges], None if masks is None else masks[edges])
        return pairs.index_copy(0, edges, self.pairs_by_row(*of_edges))

    def pairs_by_row(self, slot: Tensor, first: Tensor, stop: Tensor, masks: Tensor | None) -> Tensor:
        """int64: pairs between the rows of ``slot`` that ``masks`` name and the keys ``first`` to ``stop - 1``."""
        low = torch.maximum(first.unsqueeze(-1), self.first_key[slot])
        seen = torch.minimum(stop.unsqueeze(-1), self.position[slot] + 1).sub_(low).clamp_(min=0)
        if masks is not None:
            seen *= masks.unsqueeze(-1) >> torch.arange(self.position.shape[1], device=slot.device) & 1
        return seen.sum(-1)


def _count_bits(masks_32: Tensor, bits: int) -> Tensor:
    """int64: number of the lowest ``bits`` bits of each int64 that are set."""
    counts = []
    for first in (0, 32):  # in halves: a shift to the right copies the sign of an int64
        half = masks_32 >> first & (1 << max(0, min(bits - first, 32))) - 1
        half = half - (half >> 1 & 0x55555555)
        half = (half & 0x33333333) + (half >> 2 & 0x33333333)
        half = half + (half >> 4) & 0x0F0F0F0F
        counts.append(half * 0x01010101 >> 24 & 0xFF)
    return counts[0] + counts[1]
