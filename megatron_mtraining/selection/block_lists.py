"""Common parts of the selections of block lists: fixed-point numbers, documents of tokens, making the lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..layout import blocks_of
from ..request import AttentionRequest
from ..tensors import to_device
from ..types import BlockListIndex

EXACT_BITS = 53
"""Bits of whole numbers that are exact in float64, as are their sums, in any order."""


def operand_bits(terms: int) -> int:
    """Return the bits that each operand of a float64 product may have for a sum of ``terms`` products to be exact."""
    return (EXACT_BITS - (terms - 1).bit_length()) // 2


def exponent_of(largest: Tensor) -> Tensor:
    """Return the least integer ``e`` with ``largest < 2 ** e``, int32, of magnitudes in float64."""
    return torch.frexp(largest).exponent


def fixed_point(numbers: Tensor, exponent: Tensor, bits: int) -> Tensor:
    """Round ``numbers`` to units of ``2 ** (exponent - bits)``: whole numbers of up to ``bits`` bits, in float64."""
    return torch.ldexp(numbers.double(), (bits - exponent).double()).round()


def rows_of(request: AttentionRequest) -> Iterator[tuple[int, AttentionRequest]]:
    """Yield each batch row and its own request, with zeros for padding; the given request where nothing is padded."""
    for row in range(request.query.shape[0]):
        yield (row, request) if request.num_valid is None else (0, _without_padding(request.of_row(row)))


def _without_padding(request: AttentionRequest) -> AttentionRequest:
    """Return the request of one row with zeros for padding, as behind the end of a sequence."""
    positions = request.shards.positions(request.query.device)
    is_padding = positions >= ends_of_text(request, positions.device)[documents_of(positions, request)]
    query, key = (each.masked_fill(is_padding.view(1, -1, 1, 1), 0) for each in (request.query, request.key))
    return replace(request, query=query, key=key)


def documents_of(positions: Tensor, request: AttentionRequest) -> Tensor:
    """int64: document of each global position; 0 without documents, the last one behind the end."""
    if request.documents is None:
        return torch.zeros_like(positions)
    ends = to_device(torch.tensor(request.documents.bounds[1:], device="cpu"), positions.device)
    return torch.searchsorted(ends, positions, right=True).clamp_(max=request.documents.count - 1)


def first_tokens(request: AttentionRequest, device: torch.device) -> Tensor:
    """int64 ``[documents]``: first token of each document."""
    starts = [0] if request.documents is None else request.documents.bounds[:-1]
    return to_device(torch.tensor(starts, device="cpu"), device)


def are_short(request: AttentionRequest, device: torch.device) -> Tensor:
    """bool ``[documents]``: True for documents that attend densely for their length; none that is padding alone."""
    is_short = [0 < stop - start <= request.config.dense_below for start, stop in request.spans]
    return to_device(torch.tensor(is_short, device="cpu"), device)


def ends_of_text(request: AttentionRequest, device: torch.device) -> Tensor:
    """int64 ``[documents]``: one past the last token of each that is not padding."""
    return to_device(torch.tensor([stop for _, stop in request.spans], device="cpu"), device)


class ListBuilder:
    """Builder of the lists of query blocks, batch row by batch row, head by head, block by block."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []
        self._chunks: list[Tensor] = []
        self._row_masks: list[Tensor] = []

    def add(self, selected: Tensor, row_masks: Tensor | None = None) -> None:
        """Take the next blocks. The host waits for the number of entries.

        Args:
            selected: bool ``[blocks, chunks]``.
            row_masks: int64 of that shape, where entries have row masks.
        """
        self._counts.append(selected.sum(1))
        self._chunks.append(selected.nonzero()[:, 1].int())
        if row_masks is not None:
            self._row_masks.append(row_masks[selected])

    def index(self, request: AttentionRequest, *, chunk_blocks: int) -> BlockListIndex:
        """Return the lists of all blocks of this rank."""
        counts = torch.cat(self._counts)
        edges = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        batch, _, num_heads, _ = request.query.shape
        num_blocks = counts.numel() // (batch * num_heads)
        starts = edges.unfold(0, num_blocks + 1, num_blocks).unflatten(0, (batch, num_heads))
        return BlockListIndex(
            starts.int().contiguous(),
            torch.cat(self._chunks),
            torch.cat(self._row_masks) if self._row_masks else None,
            chunk_blocks=chunk_blocks,
            block_size=request.config.block_size,
            query_blocks=blocks_of(request.layout, request.groups.cp.rank),
        )
