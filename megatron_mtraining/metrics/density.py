"""Count of the (query, key) pairs an index keeps, exact from its lists: no blocks x blocks, no seq x seq."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tensors import to_device
from ..types import VerticalSlashIndex
from .lists import counted_slashes, counted_verticals
from .spans import row_spans


def causal_pairs(index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """int64 ``[rows]``: pairs that dense causal attention computes for one head; those inside each document."""
    lengths = [stop - start for start, stop in row_spans(index, seq_len=seq_len, cu_seqlens=cu_seqlens)]
    return to_device(triangle(torch.tensor(lengths, dtype=torch.int64, device="cpu")), index.vertical.device)


def computed_pairs(index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """int64 ``[rows, num_lists]``: pairs that a head computes by each list; one that is vertical and slash counts once.

    Args:
        index: the keys of each head.
        seq_len: tokens in the global sequence.
        cu_seqlens: int32 ``[documents + 1]``, for packed documents.
    """
    return computed_pairs_of_spans(index, row_spans(index, seq_len=seq_len, cu_seqlens=cu_seqlens), seq_len=seq_len)


def computed_pairs_of_spans(index: VerticalSlashIndex, spans: Sequence[tuple[int, int]], *, seq_len: int) -> Tensor:
    """Count as :func:`computed_pairs` where the rows of ``index`` are of ``spans``, first token and one past the last.

    The host does not wait for the device.
    """
    table = to_device(torch.tensor(spans, dtype=torch.int64, device="cpu"), index.vertical.device)
    start, stop = table[:, :, None, None].unbind(1)
    vertical, slash = counted_verticals(index, seq_len=seq_len), counted_slashes(index, seq_len=seq_len)
    only_vertical = _vertical_only_pairs(vertical, slash, index.block_size, start, stop)
    return _slash_pairs(slash, index.block_size, start, stop).sum(-1) + only_vertical.sum(-1)


def density(index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """float64 ``[num_lists]``: computed pairs over causal pairs, all rows together. Their mean is that of all heads."""
    computed = computed_pairs(index, seq_len=seq_len, cu_seqlens=cu_seqlens).sum(0)
    return computed.double() / causal_pairs(index, seq_len=seq_len, cu_seqlens=cu_seqlens).sum()


def triangle(length: int | Tensor) -> int | Tensor:
    """Causal pairs of ``length`` tokens."""
    return length * (length + 1) // 2


def _slash_pairs(distance: Tensor, size: int, start: Tensor, stop: Tensor) -> Tensor:
    """int64 ``[rows, num_lists, max_s]``: pairs at each distance; only a row's first and last block may be short."""
    first_block, last_block = start // size, (stop - 1) // size
    blocks = last_block - first_block + 1
    in_first, in_last = (first_block + 1) * size - start, stop - last_block * size
    diagonal = triangle(in_first) + triangle(in_last) + (blocks - 2) * triangle(torch.tensor(size, device="cpu"))
    diagonal = torch.where(blocks == 1, triangle(stop - start), diagonal)
    farthest = in_first * in_last
    between = (in_first + in_last + (blocks - 2 - distance) * size) * size
    pairs = torch.where(distance == 0, diagonal, torch.where(distance == blocks - 1, farthest, between))
    # Padding is farther than any block; an empty row has no pair even at distance 0.
    return pairs.masked_fill((distance >= blocks) | (stop == start), 0)


def _vertical_only_pairs(position: Tensor, slash: Tensor, size: int, start: Tensor, stop: Tensor) -> Tensor:
    """int64 ``[rows, num_lists, max_v]``: the queries of each vertical in whose block row no slash covers it."""
    block, last_block = position // size, (stop - 1) // size
    reach = last_block - block
    nearer = torch.searchsorted(slash, reach.contiguous())
    at_reach = slash.gather(2, nearer.clamp(max=slash.shape[2] - 1)) == reach
    # Of the block rows after the vertical's own, which distance 0 covers, all are whole but the last.
    covered = (nearer - 1) * size + at_reach * (stop - last_block * size)
    after_own_block = stop - (block + 1) * size
    is_in_row = (position >= start) & (position < stop) & (reach > 0)
    return (after_own_block - covered).masked_fill(~is_in_row, 0)
