"""Pairs of a tile of queries and a tile of keys: a chunk at a time, never a table of all against all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..geometry import block_slots
from .query_tiles import QueryTiles


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
