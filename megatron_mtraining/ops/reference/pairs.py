"""Which tiles of queries meet which tiles of keys, a chunk at a time, never as a table of all against all.

A query tile is one block of one head. Of the documents that share a block only the first can reach back over the
block's start: the others begin inside it. So a query tile looks up one list, its first document's; what lies
inside the block itself is kept whole (distance 0 always is), and an element mask keeps each row to its document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...types import VerticalSlashIndex
from ..geometry import BlockGeometry
from ..vertical import block_slots, to_device

_TABLE_ENTRIES = 1 << 18
"""Most entries of a lookup table (query tiles x list entries) that is expanded at one time."""


@dataclass(frozen=True, slots=True)
class TilePairs:
    """Some pairs of a query tile and a key tile, sorted by query tile, and which of their elements count."""

    query_tile: Tensor
    """int64 ``[pairs]``, ascending."""

    key_tile: Tensor
    """int64 ``[pairs]``."""

    columns: Tensor | None
    """bool ``[pairs, key tile length]``: keys that count for the pair; None where all do."""

    edges: Tensor
    """int64 ``[edges]``: pairs in which it depends on the row, too, whether a key counts."""

    edge_mask: Tensor
    """bool ``[edges, block_size, key tile length]``: elements of those pairs that count."""


class QueryTiles:
    """The query tiles of one call, numbered ``(batch * num_heads + head) * query blocks + slot``."""

    def __init__(self, index: VerticalSlashIndex, geometry: BlockGeometry, *, batch: int, device: torch.device) -> None:
        self.index = index
        self.geometry = geometry
        self.device = device
        self.num_slots = geometry.query_blocks.numel()
        self.count = batch * index.num_heads * self.num_slots
        self._block = to_device(geometry.query_blocks, device)
        self._ends = None
        if geometry.documents is not None:
            self._starts, self._ends = (
                to_device(torch.tensor(bounds), device)
                for bounds in (geometry.documents.bounds[:-1], geometry.documents.bounds[1:])
            )

    def block(self, tile: Tensor) -> Tensor:
        """Global block of each tile."""
        return self._block[tile % self.num_slots]

    def head(self, tile: Tensor) -> Tensor:
        """Query head of each tile."""
        return tile // self.num_slots % self.index.num_heads

    def batch(self, tile: Tensor) -> Tensor:
        """Batch row of each tile."""
        return tile // (self.num_slots * self.index.num_heads)

    def list_row(self, tile: Tensor) -> Tensor:
        """Row of the index whose lists serve each tile: its batch row, or the document of its first token."""
        return self.batch(tile) if self._ends is None else self._document(self.block(tile) * self.geometry.block_size)

    def span(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """First token, and one past the last, of the document that each tile's first row belongs to."""
        if self._ends is None:
            return torch.zeros_like(tile), torch.full_like(tile, self.geometry.seq_len)
        document = self.list_row(tile)
        return self._starts[document], self._ends[document]

    def row_positions(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """For each row of each tile, ``[tiles, block_size]``: its position, and where its document starts."""
        size = self.geometry.block_size
        position = self.block(tile).unsqueeze(-1) * size + torch.arange(size, device=self.device)
        start = torch.zeros_like(position) if self._ends is None else self._starts[self._document(position)]
        return position, start

    def slabs(self, entries: int) -> Iterator[Tensor]:
        """All tile numbers, in pieces for which a table of ``entries`` columns stays small."""
        step = max(1, _TABLE_ENTRIES // max(1, entries))
        for first in range(0, self.count, step):
            yield torch.arange(first, min(first + step, self.count), device=self.device)

    def _document(self, position: Tensor) -> Tensor:
        document = torch.searchsorted(self._ends, position, right=True)
        return document.clamp_(max=self._ends.numel() - 1)  # positions behind the end of the sequence


def slash_pairs(tiles: QueryTiles, *, num_kv_heads: int, chunk: int) -> Iterator[TilePairs]:
    """Pairs that the slashes keep among the keys at hand, at most ``chunk`` at a time.

    Key tiles are numbered ``(batch * num_kv_heads + kv_head) * key blocks + slot``.
    """
    index, geometry = tiles.index, tiles.geometry
    size, group = geometry.block_size, index.num_heads // num_kv_heads
    slots = block_slots(geometry.key_blocks, geometry.num_blocks, tiles.device)
    entry = torch.arange(index.slash.shape[-1], device=tiles.device)
    for tile in tiles.slabs(entry.numel()):
        row, head = tiles.list_row(tile), tiles.head(tile)
        first_key, end = tiles.span(tile)
        key_block = tiles.block(tile).unsqueeze(-1) - index.slash[row, head]
        slot = slots[key_block.clamp(min=0)]
        is_kept = (entry < index.num_slash[row, head].unsqueeze(-1)) & (key_block >= 0) & (slot >= 0)
        is_kept &= (key_block + 1) * size > first_key.unsqueeze(-1)
        which, column = is_kept.nonzero(as_tuple=True)
        first_slot = (tiles.batch(tile) * num_kv_heads + head // group) * geometry.key_blocks.numel()
        key_tile = first_slot[which] + slot[which, column]
        key_block = key_block[which, column]
        is_edge = (
            (key_block == tiles.block(tile)[which])
            | (key_block * size < first_key[which])
            | _ends_inside(tiles, tile, end)[which]
        )
        for part in _parts(which.numel(), chunk):
            edges = is_edge[part].nonzero().squeeze(-1)
            key_position = key_block[part][edges].unsqueeze(-1) * size + torch.arange(size, device=tiles.device)
            edge_mask = _row_mask(tiles, tile[which[part]][edges], key_position)
            yield TilePairs(tile[which[part]], key_tile[part], None, edges, edge_mask)


def vertical_pairs(tiles: QueryTiles, *, tile_len: int, chunk: int) -> Iterator[TilePairs]:
    """Pairs that only a vertical keeps, at most ``chunk`` at a time, over packed keys in tiles of ``tile_len``.

    Key tiles are numbered ``(row * num_heads + head) * tiles of a list + tile``.
    """
    index, geometry = tiles.index, tiles.geometry
    num_tiles = -(-index.vertical.shape[-1] // tile_len)
    for tile in tiles.slabs(max(num_tiles * tile_len, geometry.num_blocks)):
        row, head = tiles.list_row(tile), tiles.head(tile)
        first_key, end = tiles.span(tile)
        position, is_kept = _vertical_columns(tiles, tile, row, head)
        is_kept &= position >= first_key.unsqueeze(-1)
        padding = num_tiles * tile_len - position.shape[-1]
        is_kept = torch.nn.functional.pad(is_kept, (0, padding)).view(-1, num_tiles, tile_len)
        position = torch.nn.functional.pad(position, (0, padding)).view(-1, num_tiles, tile_len)
        which, column = is_kept.any(-1).nonzero(as_tuple=True)
        key_tile = ((row * index.num_heads + head) * num_tiles)[which] + column
        is_edge = _ends_inside(tiles, tile, end)[which]
        for part in _parts(which.numel(), chunk):
            edges = is_edge[part].nonzero().squeeze(-1)
            edge_mask = _row_mask(tiles, tile[which[part]][edges], position[which[part][edges], column[part][edges]])
            columns = is_kept[which[part], column[part]]
            yield TilePairs(tile[which[part]], key_tile[part], columns, edges, edge_mask)


def _vertical_columns(tiles: QueryTiles, tile: Tensor, row: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of each tile's verticals, ``[tiles, max_v]``, and which lie in an earlier block and in no slash."""
    index, geometry = tiles.index, tiles.geometry
    entry = torch.arange(index.vertical.shape[-1], device=tiles.device)
    position = index.vertical[row, head].long()
    distance = tiles.block(tile).unsqueeze(-1) - position // geometry.block_size
    is_counted = (entry < index.num_vertical[row, head].unsqueeze(-1)) & (distance > 0)
    is_slash = _slash_table(index, geometry.num_blocks, row, head)
    return position, is_counted & ~is_slash.gather(1, distance.clamp(0, geometry.num_blocks))


def _slash_table(index: VerticalSlashIndex, num_blocks: int, row: Tensor, head: Tensor) -> Tensor:
    """bool ``[tiles, num_blocks + 1]``: is a distance among the slashes of each tile's list?"""
    slash, count = index.slash[row, head].long(), index.num_slash[row, head].unsqueeze(-1)
    is_counted = torch.arange(slash.shape[-1], device=slash.device) < count
    table = torch.zeros(row.numel(), num_blocks + 1, dtype=torch.bool, device=slash.device)
    table.scatter_(1, torch.where(is_counted, slash, num_blocks), True)
    table[:, num_blocks] = False
    return table


def _ends_inside(tiles: QueryTiles, tile: Tensor, end: Tensor) -> Tensor:
    """Does the document of the first row end before the block (and the sequence) does?"""
    block_end = (tiles.block(tile) + 1) * tiles.geometry.block_size
    return end < block_end.clamp(max=tiles.geometry.seq_len)


def _row_mask(tiles: QueryTiles, tile: Tensor, key_position: Tensor) -> Tensor:
    """bool ``[tiles, block_size, keys]``: is the key causal for the row and in its document?"""
    position, start = tiles.row_positions(tile)
    key_position = key_position.unsqueeze(1)
    return (key_position <= position.unsqueeze(-1)) & (key_position >= start.unsqueeze(-1))


def _parts(count: int, chunk: int) -> Iterator[slice]:
    return (slice(first, min(first + chunk, count)) for first in range(0, count, chunk))
