"""Selection of MoBA (arXiv 2502.13189): each query selects its own chunk of keys and those with the best means.

What is compared is summed exactly, so that every number of ranks and every layout selects the same chunks:

1. each rank adds up the keys that it holds, chunk by chunk, as integers, and one all-reduce joins the sums;
2. means and queries become fixed-point numbers whose inner product float64 holds exactly. The unit of a query is its
   own, and that of the means is one for all, which changes no order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..request import SCRATCH_ELEMENTS, AttentionRequest
from ..tensors import to_device
from ..types import AttentionIndex, BlockListIndex
from .block_lists import (
    ListBuilder,
    are_short,
    documents_of,
    ends_of_text,
    exponent_of,
    first_tokens,
    fixed_point,
    operand_bits,
    rows_of,
)
from .dense import every_key

_SUM_BITS = 24
"""Bits behind the point of keys that are added up: their unit is ``2 ** -24``."""


def prepare(request: AttentionRequest) -> Callable[[], Callable[[], AttentionIndex]]:
    """Plan the choice of ``config.moba_top_k`` chunks of ``config.moba_chunk`` keys for every query token and head.

    A query selects its own chunk, and of the chunks before it those with the greatest ``query . mean key``, ties to the
    earlier chunk. Chunks stand on the global grid; in packed documents a chunk is what it holds of the query's own
    document. Documents of up to ``config.dense_below`` tokens select all chunks, and padding its own chunk alone. The
    index holds the lists of this rank's query blocks; where every document is short, it is that of all pairs.
    """
    if request.is_short:
        return lambda: lambda: every_key(request)
    segments = _Segments.of(request)
    return lambda: lambda: _choose(request, segments)


def _choose(request: AttentionRequest, segments: _Segments) -> BlockListIndex:
    num_heads = request.query.shape[2]
    builder, group = ListBuilder(), num_heads // request.key.shape[2]
    for of_rows in [request] if request.num_valid is None else [of_row for _, of_row in rows_of(request)]:
        means = _mean_keys(of_rows, segments)
        for row, head in product(range(of_rows.query.shape[0]), range(num_heads)):
            _add_head(builder, of_rows, segments, means[row, head // group], row, head)
    return builder.index(request, chunk_blocks=request.config.moba_chunk // request.config.block_size)


@dataclass(frozen=True, slots=True)
class _Segments:
    """The pieces of the sequence whose keys have one mean: chunks, cut where documents begin."""

    starts: Tensor
    """int64 ``[segments]``, on the query's device: first token of each."""

    lengths: Tensor
    """int64 ``[segments]``."""

    chunk: Tensor
    """int64 ``[segments]``: chunk that each lies in."""

    @classmethod
    def of(cls, request: AttentionRequest) -> _Segments:
        seq_len, chunk_len = request.shards.layout.seq_len, request.config.moba_chunk
        bounds = () if request.documents is None else request.documents.bounds[:-1]
        edges = torch.tensor(sorted({*range(0, seq_len, chunk_len), *bounds} - {seq_len}) + [seq_len], device="cpu")
        starts = to_device(edges[:-1], request.query.device)
        return cls(starts, to_device(edges.diff(), request.query.device), starts // chunk_len)

    def valid_lengths(self, request: AttentionRequest) -> Tensor:
        """int64 ``[segments]``: tokens of each that are not padding, and 1 where all are."""
        if request.num_valid is None:
            return self.lengths
        ends = ends_of_text(request, self.starts.device)[documents_of(self.starts, request)]
        return torch.minimum(self.lengths, ends - self.starts).clamp_(min=1)

    def at(self, positions: Tensor) -> Tensor:
        """int64: the segment of each position; the last one behind the end."""
        return torch.searchsorted(self.starts, positions, right=True) - 1


def _mean_keys(request: AttentionRequest, segments: _Segments) -> Tensor:
    """float64 ``[batch, num_kv_heads, segments, head_dim]``: means in fixed point, the same bits on every rank."""
    key, positions = request.key, request.shards.positions(request.key.device)
    batch, local_len, num_kv_heads, head_dim = key.shape
    total = torch.zeros(batch, len(segments.starts), num_kv_heads, head_dim, dtype=torch.int64, device=key.device)
    step = max(1, SCRATCH_ELEMENTS // (batch * num_kv_heads * head_dim))
    for first in range(0, local_len, step):
        tokens = slice(first, first + step)
        units = (key[:, tokens].double() * 2.0**_SUM_BITS).round().long()
        total.index_add_(1, segments.at(positions[tokens]), units)
    total = request.shards.transport.all_reduce(total)
    mean = (total.double() / segments.valid_lengths(request).view(-1, 1, 1)).transpose(1, 2)
    exponent = exponent_of(mean.abs().amax((2, 3), keepdim=True))
    return fixed_point(mean, exponent, operand_bits(head_dim))


def _add_head(
    builder: ListBuilder, request: AttentionRequest, segments: _Segments, mean: Tensor, row: int, head: int
) -> None:
    """Add the lists of one head, a few query blocks at a time; ``mean`` is ``[segments, head_dim]``."""
    size, device = request.config.block_size, request.query.device
    num_chunks = -(-request.shards.layout.seq_len // request.config.moba_chunk)
    positions = request.shards.positions(device)
    own, document = segments.at(positions), documents_of(positions, request)
    is_padding = positions >= ends_of_text(request, device)[document]
    first = segments.at(first_tokens(request, device))[document].where(~is_padding, own)
    selects_all = are_short(request, device)[document]
    step = max(1, SCRATCH_ELEMENTS // (len(mean) * size)) * size
    for start in range(0, len(positions), step):
        tokens = slice(start, start + step)
        query = request.query[row, tokens, head].double()
        exponent = exponent_of(query.abs().amax(1, keepdim=True))
        gate = fixed_point(query, exponent, operand_bits(query.shape[1])) @ mean.T
        selected = _selected_segments(gate, first[tokens], own[tokens], selects_all[tokens], request.config.moba_top_k)
        masks = _row_masks(selected, segments, size, num_chunks)
        own_chunk = segments.chunk[own[tokens][::size]]
        masks.scatter_(1, own_chunk.unsqueeze(1), -1 if size == 64 else (1 << size) - 1)
        builder.add(masks != 0, masks)


def _selected_segments(gate: Tensor, first: Tensor, own: Tensor, selects_all: Tensor, top_k: int) -> Tensor:
    """bool ``[tokens, segments]``: the ``top_k - 1`` best of the segments ``first`` to ``own - 1``, and ``own``."""
    segment = torch.arange(gate.shape[1], device=gate.device)
    is_before = (segment >= first.unsqueeze(1)) & (segment < own.unsqueeze(1))
    most = min(top_k - 1, gate.shape[1])
    selected = is_before & selects_all.unsqueeze(1)
    if most:
        gate = gate.masked_fill(~is_before, -torch.inf)
        least = gate.topk(most, dim=1).values[:, -1:]
        is_greater, is_equal = gate > least, gate == least
        left = most - is_greater.sum(1, keepdim=True)
        selected |= is_before & (is_greater | is_equal & (is_equal.cumsum(1) <= left))
    return selected | (segment == own.unsqueeze(1))


def _row_masks(selected: Tensor, segments: _Segments, block_size: int, num_chunks: int) -> Tensor:
    """int64 ``[blocks, chunks]``: bit r is set if row r of the block selects a segment of the chunk."""
    short = -len(selected) % block_size
    rows = torch.nn.functional.pad(selected, (0, 0, 0, short)).view(-1, block_size, selected.shape[1])
    bit = torch.arange(block_size, device=selected.device).view(-1, 1)
    by_segment = (rows.long() << bit).sum(1)
    # A row selects segments of one document, of which a chunk has one: bits of a chunk's segments never collide.
    masks = by_segment.new_zeros(len(rows), num_chunks)
    return masks.index_add_(1, segments.chunk, by_segment)
