"""Pairs of a tile of queries and a tile of keys by a :class:`BlockListIndex`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..geometry import block_slots
from .pairs import TilePairs, pairs_of_part, parts_of
from .query_tiles import QueryTiles


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
