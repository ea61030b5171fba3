"""Block masks of FlexAttention for an index, worked out block by block: nothing of size tokens x tokens is made.

A block of 128 x 128 pairs is skipped when no pair in it is selected, and needs no mask when all are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megatron_mtraining.types import VerticalSlashIndex

MASK_BLOCK = 128

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class SelectedTables:
    """Lookup tables of an index: vertical columns and slash distances."""

    def __init__(self, index: VerticalSlashIndex, seq_len: int) -> None:
        self.block_size, self.seq_len = index.block_size, seq_len
        self.num_blocks = -(-seq_len // index.block_size)
        self.position = index.vertical.long()
        self.is_vertical = _marked(index.vertical, seq_len)
        self.is_slash = _marked(index.slash, self.num_blocks)
        self.num_tiles = -(-seq_len // MASK_BLOCK)

    def slash(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the mask of the slash pairs."""
        distance = q // self.block_size - k // self.block_size
        return (q >= k) & self.is_slash[b, h, distance.clamp(min=0)]

    def either(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the mask of all selected pairs."""
        return self.slash(b, h, q, k) | ((q >= k) & self.is_vertical[b, h, k])

    def packed(self, b: Tensor, h: Tensor, q: Tensor, j: Tensor) -> Tensor:
        """Return the mask of the pairs that only a vertical covers, with ``j`` counting packed columns."""
        k = self.position[b, h, j]
        distance = (q // self.block_size - k // self.block_size).clamp(min=0)
        return (q >= k) & ~self.is_slash[b, h, distance]

    def slash_blocks(self) -> BlockMask:
        """Return the blocks of :meth:`slash`."""
        some, all_ = self._slash_tiles()
        return block_mask(some, all_, self.slash, (self.seq_len, self.seq_len))

    def either_blocks(self) -> BlockMask:
        """Return the blocks of :meth:`either`."""
        some, all_ = self._slash_tiles()
        past = torch.arange(self.num_tiles, device=some.device)
        columns = _tiled(self.is_vertical, self.num_tiles * MASK_BLOCK)
        before = past[:, None] - past
        some = some | (columns.any(-1)[:, :, None] & (before >= 0))
        all_ = all_ | (columns.all(-1)[:, :, None] & (before > 0))
        return block_mask(some, all_, self.either, (self.seq_len, self.seq_len))

    def packed_blocks(self) -> BlockMask:
        """Return the blocks of :meth:`packed`, over queries and packed columns."""
        width = self.position.shape[2]
        rows = torch.arange(self.num_tiles * MASK_BLOCK // self.block_size, device=self.position.device)
        distance = rows[:, None] - (self.position // self.block_size)[:, :, None]
        covered = self.is_slash.flatten(0, 1).unsqueeze(1).expand(-1, len(rows), -1)
        reach = distance.clamp(0, self.num_blocks - 1).flatten(0, 1)
        is_open = (distance >= 0) & ~covered.gather(2, reach).view_as(distance)
        is_open &= (self.position < self.seq_len)[:, :, None]
        tiles = _tiled(is_open, -(-width // MASK_BLOCK) * MASK_BLOCK)
        some = tiles.any(-1).unflatten(2, (self.num_tiles, -1)).any(3)
        return block_mask(some, torch.zeros_like(some), self.packed, (self.seq_len, width))

    def _slash_tiles(self) -> tuple[Tensor, Tensor]:
        """Return bool ``[rows, heads, tiles, tiles]``: tiles with a slash pair, and tiles with slash pairs alone."""
        tile = torch.arange(self.num_tiles, device=self.is_slash.device)
        step = MASK_BLOCK // self.block_size
        distance = step * (tile[:, None] - tile)
        query_blocks = (self.num_blocks - step * tile).clamp(max=step)[:, None]  # the last tile may hold fewer
        found = [
            self.is_slash[:, :, (distance + i).clamp(0, self.num_blocks - 1)] & (distance + i >= 0) & (i < query_blocks)
            for i in range(1 - step, step)
        ]
        inside = distance >= 0
        some, all_ = torch.stack(found).any(0) & inside, torch.stack(found).all(0) & (distance > 0)
        whole = (tile[:, None] + 1) * MASK_BLOCK <= self.seq_len
        return some, all_ & whole


def block_mask(some: Tensor, all_: Tensor, mask: Mask, lengths: tuple[int, int]) -> BlockMask:
    """Return FlexAttention's mask from blocks that hold a selected pair and blocks that hold nothing else.

    Args:
        some: bool ``[rows, heads, query blocks, key blocks]``.
        all_: likewise; a subset of ``some``.
        mask: of single pairs.
        lengths: tokens of queries and of keys.
    """
    partial = _listed(some & ~all_)
    full = _listed(all_)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=MASK_BLOCK, mask_mod=mask, seq_lengths=lengths)


def issued_pairs(mask: BlockMask) -> int:
    """Count pairs of the blocks that are computed."""
    blocks = int(mask.kv_num_blocks.sum()) + int(mask.full_kv_num_blocks.sum())
    return blocks * MASK_BLOCK * MASK_BLOCK


def _marked(entries: Tensor, size: int) -> Tensor:
    """Return bool ``[rows, heads, size]``, True where the integer is listed. Lists are padded with ``size`` itself."""
    marked = torch.zeros(*entries.shape[:2], size + 1, dtype=torch.bool, device=entries.device)
    return marked.scatter_(2, entries.long(), True)[..., :size].contiguous()


def _tiled(flags: Tensor, length: int) -> Tensor:
    """Return the last dimension, padded with False to ``length``, as tiles of MASK_BLOCK."""
    return torch.nn.functional.pad(flags, (0, length - flags.shape[-1])).unflatten(-1, (-1, MASK_BLOCK))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number and ascending list of the marked key blocks of each query block."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()
