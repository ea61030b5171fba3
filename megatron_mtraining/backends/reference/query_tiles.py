"""The tiles of the queries: one block of one head each, and what the index and the documents say about it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...tensors import to_device
from ...types import AttentionIndex
from ..geometry import BlockGeometry

_TABLE_ENTRIES = 1 << 18
"""Most entries of a lookup table (query tiles x list entries) that is expanded at one time."""


class QueryTiles:
    """The query tiles of one call, numbered ``(batch * num_heads + head) * query blocks + slot``.

    Of the documents that share a block only the first can reach back over the block's start: the others begin inside
    it. So a query tile looks up one list, that of its first document. By distances what lies inside the block itself is
    selected as a whole, since distance 0 always is; a mask restricts each row to its document there.
    """

    def __init__(
        self, index: AttentionIndex, geometry: BlockGeometry, *, batch: int, num_heads: int, device: torch.device
    ) -> None:
        self.index = index
        self.num_heads = num_heads
        self.geometry = geometry
        self.device = device
        self.num_slots = geometry.query_blocks.numel()
        self.count = batch * num_heads * self.num_slots
        self._blocks = to_device(geometry.query_blocks, device)
        self._bounds = (
            None
            if geometry.documents is None
            else to_device(torch.tensor(geometry.documents.bounds, device="cpu"), device)
        )

    def slabs(self, entries: int) -> Iterator[Tensor]:
        """Yield all tile numbers, in pieces for which a table of ``entries`` columns stays small."""
        step = max(1, _TABLE_ENTRIES // max(1, entries))
        for first in range(0, self.count, step):
            yield torch.arange(first, min(first + step, self.count), device=self.device)

    def block(self, tile: Tensor) -> Tensor:
        """Global block of each tile."""
        return self._blocks[tile % self.num_slots]

    def head(self, tile: Tensor) -> Tensor:
        """Query head of each tile."""
        return tile // self.num_slots % self.num_heads

    def list_number(self, tile: Tensor) -> Tensor:
        """List number within a row of the index that serves the head of each tile."""
        return self.head(tile) // (self.num_heads // self.index.num_lists)

    def batch(self, tile: Tensor) -> Tensor:
        """Batch row of each tile."""
        return tile // (self.num_slots * self.num_heads)

    def list_row(self, tile: Tensor) -> Tensor:
        """Row of the index whose lists serve each tile: its batch row, or the document of its first token."""
        if self._bounds is None:
            return self.batch(tile)
        return self._document(self.block(tile) * self.geometry.block_size)

    def first_key(self, tile: Tensor) -> Tensor:
        """First token of the document that each tile's first row belongs to."""
        return torch.zeros_like(tile) if self._bounds is None else self._bounds[self.list_row(tile)]

    def is_shared(self, tile: Tensor) -> Tensor:
        """True if rows of a later document follow in the tile."""
        if self._bounds is None:
            return torch.zeros_like(tile, dtype=torch.bool)
        block_end = (self.block(tile) + 1) * self.geometry.block_size
        return self._bounds[self.list_row(tile) + 1] < block_end.clamp(max=self.geometry.seq_len)

    def element_mask(self, tile: Tensor, key_position: Tensor) -> Tensor:
        """True if a key is causal for a row and in its document.

        Args:
            tile: int64 ``[pairs]``.
            key_position: int64 ``[pairs, keys]``.

        Returns:
            bool ``[pairs, block_size, keys]``.
        """
        size = self.geometry.block_size
        position = self.block(tile).unsqueeze(-1) * size + torch.arange(size, device=self.device)
        mask = key_position.unsqueeze(1) <= position.unsqueeze(-1)
        if self._bounds is not None:
            mask &= key_position.unsqueeze(1) >= self._bounds[self._document(position)].unsqueeze(-1)
        return mask

    def _document(self, position: Tensor) -> Tensor:
        ends = self._bounds[1:]
        document = torch.searchsorted(ends, position, right=True)  # passes over empty documents
        return document.clamp_(max=ends.numel() - 1)  # the short last block has rows behind the end
