"""Lists of an index as far as they count: what stands behind the counts is not looked at, as no backend does."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import VerticalSlashIndex


def counted_verticals(index: VerticalSlashIndex, *, seq_len: int) -> Tensor:
    """int64 ``[rows, num_lists, max_v]``: the verticals, ascending; ``seq_len`` behind those that count."""
    return _counted(index.vertical, index.num_vertical, seq_len)


def counted_slashes(index: VerticalSlashIndex, *, seq_len: int) -> Tensor:
    """int64 ``[rows, num_lists, max_s]``: the distances, ascending; the number of blocks behind those that count."""
    return _counted(index.slash, index.num_slash, -(-seq_len // index.block_size))


def slash_runs(index: VerticalSlashIndex) -> Tensor:
    """int64 ``[rows, num_lists]``: number of runs of neighbouring distances in a list; an isolated one is a run."""
    counted = torch.arange(index.slash.shape[-1], device=index.slash.device) < index.num_slash.unsqueeze(-1)
    follows = torch.zeros_like(counted)
    follows[..., 1:] = index.slash.diff(dim=-1) == 1
    return (counted & ~follows).sum(-1)


def _counted(entries: Tensor, counts: Tensor, padding: int) -> Tensor:
    position = torch.arange(entries.shape[-1], device=entries.device)
    return entries.long().where(position < counts.unsqueeze(-1), padding)
