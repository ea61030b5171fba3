"""Tensors cut into tiles: one block of one head, contiguous, so that any set of tiles is one ``index_select``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def to_tiles(tensor: Tensor, tile_len: int, dtype: torch.dtype) -> Tensor:
    """Cut ``[..., seq, head_dim]`` into ``[... * tiles, tile_len, head_dim]``; zeros fill a short last tile."""
    short = -tensor.shape[-2] % tile_len
    tensor = tensor.to(dtype)
    tensor = pad(tensor, (0, 0, 0, short)) if short else tensor
    return tensor.reshape(-1, tile_len, tensor.shape[-1])


def from_tiles(tiles: Tensor, leading: tuple[int, ...], seq_len: int) -> Tensor:
    """Return the ``[*leading, seq_len, head_dim]`` that :func:`to_tiles` cut; a view."""
    return tiles.view(*leading, -1, tiles.shape[-1])[..., :seq_len, :]


def row_tiles(rows: Tensor, tile_len: int, dtype: torch.dtype) -> Tensor:
    """Cut ``[..., seq]``, one number for each row, into ``[... * tiles, tile_len]``."""
    return to_tiles(rows.unsqueeze(-1), tile_len, dtype).squeeze(-1)


def add_at(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Add ``source[i]`` to ``target[index[i]]``, in place, in one fixed order on every device."""
    if target.device.type == "cpu":
        target.index_add_(0, index, source)
    else:  # on CUDA index_add_ adds in any order, index_put_ sorts first
        target.index_put_((index,), source, accumulate=True)
