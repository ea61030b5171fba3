"""Pairs that the products of this package's kernels cover: tiles of 64 queries by 64 keys or packed columns."""

from __future__ import annotations

import torch

from megatron_mtraining.types import VerticalSlashIndex

TILE = 64


def issued_pairs_of_tiles(index: VerticalSlashIndex, *, seq_len: int) -> int:
    """Count pairs of one forward, masked ones included: a tile that holds one selected pair is computed whole.

    A query block has a key block for each distance that does not lead before the sequence, and each 64 packed columns
    of which one lies in an earlier block and in no slash.
    """
    num_blocks = -(-seq_len // TILE)
    tiles = 0
    for row in range(index.rows):
        for head in range(index.num_lists):
            slash = index.slash[row, head, : index.num_slash[row, head]].long()
            vertical = index.vertical[row, head, : index.num_vertical[row, head]].long()
            tiles += int((num_blocks - slash).sum())
            tiles += int(_tiles_with_pairs(slash, vertical // TILE, num_blocks))
    return tiles * TILE * TILE


def _tiles_with_pairs(slash: torch.Tensor, block: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Count pairs of a query block and 64 packed columns that hold a pair outside of all slashes."""
    is_slash = torch.zeros(num_blocks, dtype=torch.bool, device=block.device)
    is_slash[slash] = True
    count = block.new_zeros(())
    for columns in block.split(TILE):
        distance = torch.arange(num_blocks, device=block.device)[:, None] - columns
        count += ((distance > 0) & ~is_slash[distance.clamp(min=0)]).any(1).sum()
    return count
