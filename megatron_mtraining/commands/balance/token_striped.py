"""The layout of striped attention: token t on rank t mod W. A model for comparison; nothing here runs on it.

A rank's neighbouring tokens are W apart in the sequence. Pairs are spread evenly, but a tile of a kernel then spans W
blocks each way, and a pair of any of the distances that it spans makes the kernel compute all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import invalid
from ...metrics.density import counted_slashes
from ...types import VerticalSlashIndex
from .owner_pairs import OwnerPairs, Owners, owner_pairs


@dataclass(frozen=True, slots=True)
class TokenStriped:
    """Pairs that fall to ranks."""

    pairs: OwnerPairs
    """Useful pairs by rank of the query and rank of the key."""

    issued: OwnerPairs
    """The same with all pairs of every tile that holds a useful slash pair."""


def token_striped(index: VerticalSlashIndex, *, seq_len: int, cp_size: int) -> TokenStriped:
    """Count on the host. Every row of ``index`` is one whole sequence.

    Raises:
        ValueError: a rank's tokens are not whole tiles, or tiles of this many ranks are not modelled.
    """
    size = index.block_size
    if cp_size > size and cp_size % size:
        raise invalid("--world", f"up to {size} or a multiple of it for token_striped", cp_size)
    if seq_len % (cp_size * size):
        raise invalid("--seq", f"a multiple of {cp_size * size} for token_striped over {cp_size} ranks", seq_len)
    pairs = _useful_pairs(index, seq_len, cp_size)
    return TokenStriped(pairs, OwnerPairs(_issued_pairs(index, seq_len, cp_size), pairs.vertical))


def _useful_pairs(index: VerticalSlashIndex, seq_len: int, cp_size: int) -> OwnerPairs:
    """Count by ``b % period``: block b holds the same ranks' tokens as block b + period."""
    size, blocks = index.block_size, seq_len // index.block_size
    period = cp_size // math.gcd(cp_size, size)
    position = torch.arange(seq_len)
    owners = Owners(
        of_blocks=torch.arange(blocks) % period,
        of_columns=position % cp_size,
        num_block_owners=period,
        num_column_owners=cp_size,
    )
    counted = owner_pairs(index, owners, seq_len=seq_len)
    owner_of_block = torch.zeros(period, cp_size, dtype=torch.int64)
    first = position[: period * size].view(period, size)
    owner_of_block.scatter_add_(1, first % cp_size, torch.ones_like(first))
    diagonals = index.rows * index.num_lists * (blocks // period)
    block_pairs = (counted.slash - torch.eye(period, dtype=torch.int64) * diagonals * size * (size + 1) // 2) // size**2
    slash = owner_of_block.T @ block_pairs @ owner_of_block + diagonals * _inside_blocks(first % cp_size, cp_size)
    return OwnerPairs(slash, owner_of_block.T @ (counted.vertical // size))


def _inside_blocks(rank: Tensor, cp_size: int) -> Tensor:
    """Return int64 ``[cp_size, cp_size]``: causal pairs in blocks whose tokens' ranks are ``[blocks, block_size]``."""
    query, key = torch.tril_indices(rank.shape[1], rank.shape[1])
    return torch.bincount((rank[:, query] * cp_size + rank[:, key]).flatten(), minlength=cp_size**2).view(cp_size, -1)


def _issued_pairs(index: VerticalSlashIndex, seq_len: int, cp_size: int) -> Tensor:
    """Return int64 ``[cp_size, cp_size]``: pairs in the touched tiles of local queries and local keys.

    The tile that lies ``m`` tiles off the diagonal holds block distances ``cp_size * m + o`` with ``|o| < cp_size``;
    where a stride passes over ``a`` whole blocks, only those with ``o = a * z + c``, ``|z| < block_size`` and ``c``
    how many blocks the query's rank lies behind the key's.
    """
    size = index.block_size
    tiles, stride = seq_len // (cp_size * size), max(1, cp_size // size)
    distance = counted_slashes(index, seq_len=seq_len)
    head = torch.arange(index.num_lists)[:, None].expand_as(distance)
    row = torch.arange(index.rows)[:, None, None].expand_as(distance)
    touched = torch.zeros(index.rows, index.num_lists, tiles, 2 * stride - 1, dtype=torch.bool)
    for next_tile in (0, 1):
        tile = distance // cp_size + next_tile
        offset = distance - tile * cp_size
        for behind in (0, stride) if stride > 1 else (0,):
            class_ = offset % stride - behind
            strides = (offset - class_) // stride
            is_touched = (distance * size < seq_len) & (tile < tiles) & (strides.abs() < size)
            is_touched &= (offset > -cp_size) & (class_ > -stride)
            touched[row[is_touched], head[is_touched], tile[is_touched], class_[is_touched] + stride - 1] = True
    in_diagonal = torch.arange(tiles, 0, -1)
    by_class = (touched * in_diagonal[:, None]).sum((0, 1, 2)) * size**2
    block = torch.arange(cp_size) // size
    return by_class[block[:, None] - block + stride - 1]
