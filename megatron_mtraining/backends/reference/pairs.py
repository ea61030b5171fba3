"""Pairs of a tile of queries and a tile of keys: a chunk at a time, never a table of all against all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...tensors import to_device
from ...types import AttentionIndex
from ..geometry import BlockGeometry, block_slots

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


@dataclass(frozen=True, slots=True)
class TilePairs:
    """Some pairs of a query tile and a key tile, and which of their elements count."""

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


def slash_pairs(tiles: QueryTiles, *, num_kv_heads: int, chunk: int) -> Iterator[TilePairs]:
    """Yield pairs that the slashes keep among the keys at hand, at most ``chunk`` at a time.

    Key tiles are numbered ``(batch * num_kv_heads + kv_head) * key blocks + slot``.
    """
    slots = block_slots(tiles.geometry.key_blocks, tiles.geometry.num_blocks, tiles.device)
    for tile in tiles.slabs(tiles.index.slash.shape[-1]):
        yield from _slash_slab(tiles, tile, slots, num_kv_heads, chunk)


def vertical_pairs(tiles: QueryTiles, *, tile_len: int, chunk: int) -> Iterator[TilePairs]:
    """Yield pairs that only a vertical keeps, at most ``chunk`` at a time, over packed keys in tiles of ``tile_len``.

    Key tiles are numbered ``(row * num_lists + list) * tiles of a list + tile``.
    """
    for tile in tiles.slabs(max(tiles.index.vertical.shape[-1], tiles.geometry.num_blocks)):
        yield from _vertical_slab(tiles, tile, tile_len, chunk)


def _slash_slab(tiles: QueryTiles, tile: Tensor, slots: Tensor, num_kv_heads: int, chunk: int) -> Iterator[TilePairs]:
    size, index = tiles.geometry.block_size, tiles.index
    of_list, first_key = (tiles.list_row(tile), tiles.list_number(tile)), tiles.first_key(tile)
    is_counted = torch.arange(index.slash.shape[-1], device=tiles.device) < index.num_slash[of_list].unsqueeze(-1)
    key_block = tiles.block(tile).unsqueeze(-1) - index.slash[of_list]
    slot = slots[key_block.clamp(min=0)]
    in_document = (key_block + 1) * size > first_key.unsqueeze(-1)
    which, entry = (is_counted & (key_block >= 0) & (slot >= 0) & in_document).nonzero(as_tuple=True)

    kv_head = tiles.head(tile) // (tiles.num_heads // num_kv_heads)
    first_tile = (tiles.batch(tile) * num_kv_heads + kv_head) * tiles.geometry.key_blocks.numel()
    key_tile = first_tile[which] + slot[which, entry]
    key_start = key_block[which, entry] * size
    is_diagonal = key_start == (tiles.block(tile) * size)[which]
    is_edge = is_diagonal | (key_start < first_key[which]) | tiles.is_shared(tile)[which]
    within = torch.arange(size, device=tiles.device)
    for part in parts_of(which.numel(), chunk):
        yield pairs_of_part(
            tiles, tile[which], key_tile, is_edge, part, lambda pair: key_start[pair].unsqueeze(-1) + within
        )


def _vertical_slab(tiles: QueryTiles, tile: Tensor, tile_len: int, chunk: int) -> Iterator[TilePairs]:
    row, number = tiles.list_row(tile), tiles.list_number(tile)
    position, is_selected = _selected_verticals(tiles, tile, row, number)
    short = -position.shape[-1] % tile_len
    position, is_selected = (pad(table, (0, short)).unflatten(-1, (-1, tile_len)) for table in (position, is_selected))
    which, list_tile = is_selected.any(-1).nonzero(as_tuple=True)

    key_tile = ((row * tiles.index.num_lists + number) * is_selected.shape[1])[which] + list_tile
    is_edge = tiles.is_shared(tile)[which]
    for part in parts_of(which.numel(), chunk):
        columns = is_selected[which[part], list_tile[part]]
        yield pairs_of_part(
            tiles, tile[which], key_tile, is_edge, part, lambda pair: position[which[pair], list_tile[pair]], columns
        )


def _selected_verticals(tiles: QueryTiles, tile: Tensor, row: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of each tile's verticals, ``[tiles, max_v]``; and a mask of those in an earlier block, outside slashes.

    Those of its own block belong to the slash of distance 0.
    """
    index, num_blocks = tiles.index, tiles.geometry.num_blocks
    position = index.vertical[row, number].long()
    distance = tiles.block(tile).unsqueeze(-1) - position // tiles.geometry.block_size
    is_counted = torch.arange(position.shape[-1], device=tiles.device) < index.num_vertical[row, number].unsqueeze(-1)
    in_document = position >= tiles.first_key(tile).unsqueeze(-1)
    in_slash = _slash_table(tiles, row, number).gather(1, distance.clamp(0, num_blocks))
    return position, is_counted & in_document & (distance > 0) & ~in_slash


def _slash_table(tiles: QueryTiles, row: Tensor, number: Tensor) -> Tensor:
    """bool ``[tiles, num_blocks + 1]``: True if a distance is among the slashes of each tile's list."""
    slash, num_blocks = tiles.index.slash[row, number].long(), tiles.geometry.num_blocks
    is_counted = torch.arange(slash.shape[-1], device=tiles.device) < tiles.index.num_slash[row, number].unsqueeze(-1)
    table = torch.zeros(row.numel(), num_blocks + 1, dtype=torch.bool, device=tiles.device)
    return table.scatter_(1, torch.where(is_counted, slash, num_blocks), True)  # padding lands in the extra column


def parts_of(count: int, chunk: int) -> Iterator[slice]:
    """Slices of at most ``chunk`` that cover ``count`` entries."""
    return (slice(first, min(first + chunk, count)) for first in range(0, count, chunk))


def pairs_of_part(
    tiles: QueryTiles,
    query_tile: Tensor,
    key_tile: Tensor,
    is_edge: Tensor,
    part: slice,
    key_positions: Callable[[Tensor], Tensor],
    columns: Tensor | None = None,
    seeing_rows: Tensor | None = None,
) -> TilePairs:
    """Return the pairs of ``part``.

    Args:
        tiles: the query tiles.
        query_tile: int64, of all pairs.
        key_tile: likewise.
        is_edge: bool, likewise: does it depend on the row whether a key counts?
        part: which pairs are wanted.
        key_positions: gives the key positions of some pairs, ``[pairs, key tile length]``.
        columns: see :class:`TilePairs`.
        seeing_rows: bool ``[pairs, block_size]``, of all pairs: rows that see any key; None where all may.
    """
    edges = is_edge[part].nonzero().squeeze(-1)
    mask = tiles.element_mask(query_tile[part][edges], key_positions(edges + part.start))
    if seeing_rows is not None:
        mask &= seeing_rows[edges + part.start].unsqueeze(-1)
    return TilePairs(query_tile[part], key_tile[part], columns, edges, mask)


def list_pairs(tiles: QueryTiles, *, num_kv_heads: int, chunk: int) -> Iterator[TilePairs]:
    """Yield pairs that the lists keep among keys at hand, at most ``chunk`` at once; tiles as in ``slash_pairs``."""
    slots = block_slots(tiles.geometry.key_blocks, tiles.geometry.num_blocks, tiles.device)
    for tile in tiles.slabs(tiles.geometry.num_blocks):
        yield from _list_slab(tiles, tile, slots, num_kv_heads, chunk)


def _list_slab(tiles: QueryTiles, tile: Tensor, slots: Tensor, num_kv_heads: int, chunk: int) -> Iterator[TilePairs]:
    size, index = tiles.geometry.block_size, tiles.index
    of_tile, entry = _entries(tiles, tile)
    inside = torch.arange(index.chunk_blocks, device=tiles.device)
    key_block = index.chunks[entry].long().unsqueeze(-1) * index.chunk_blocks + inside
    is_causal = key_block <= tiles.block(tile)[of_tile].unsqueeze(-1)
    slot = slots[key_block.where(is_causal, tiles.geometry.num_blocks)]
    in_document = (key_block + 1) * size > tiles.first_key(tile)[of_tile].unsqueeze(-1)
    of_entry, member = ((slot >= 0) & in_document).nonzero(as_tuple=True)

    which, entry = of_tile[of_entry], entry[of_entry]
    kv_head = tiles.head(tile) // (tiles.num_heads // num_kv_heads)
    first_tile = (tiles.batch(tile) * num_kv_heads + kv_head) * tiles.geometry.key_blocks.numel()
    key_tile = first_tile[which] + slot[of_entry, member]
    key_start = key_block[of_entry, member] * size
    is_diagonal = key_start == (tiles.block(tile) * size)[which]
    is_edge = is_diagonal | (key_start < tiles.first_key(tile)[which]) | tiles.is_shared(tile)[which]
    row = torch.arange(size, device=tiles.device)
    seeing_rows = None
    if index.row_masks is not None:
        seeing_rows = index.row_masks[entry].unsqueeze(-1) >> row & 1 == 1
        is_edge |= ~seeing_rows.all(-1)
    for part in parts_of(which.numel(), chunk):
        yield pairs_of_part(
            tiles, tile[which], key_tile, is_edge, part, lambda pair: key_start[pair].unsqueeze(-1) + row,
            seeing_rows=seeing_rows,
        )  # fmt: skip


def _entries(tiles: QueryTiles, tile: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of some tiles' lists, list after list: the index of their tile in ``tile``, and their own."""
    starts = tiles.index.starts[tiles.batch(tile), tiles.list_number(tile)].long()
    block = (tile % tiles.num_slots).unsqueeze(-1)
    first, stop = starts.gather(1, block).squeeze(-1), starts.gather(1, block + 1).squeeze(-1)
    count = stop - first
    of_tile = torch.arange(tile.numel(), device=tiles.device).repeat_interleave(count)
    entry = torch.arange(of_tile.numel(), device=tiles.device) - (count.cumsum(0) - count)[of_tile]
    return of_tile, first[of_tile] + entry
