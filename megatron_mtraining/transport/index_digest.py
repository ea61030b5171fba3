"""Digest of all entries of an index, made without a copy of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensors import cached_tensors
from ..types import VerticalSlashIndex

_CHUNK_ELEMENTS = 2**22
"""Most entries that are widened to 8 bytes at a time."""

_CACHED_ELEMENTS = 2**18
"""Most entries whose weights, 2 MiB of them, are cached for the next layers: then three launches make a digest."""


def index_digest(index: VerticalSlashIndex) -> Tensor:
    """int64 ``[1]`` on the index's device: a weighted sum, modulo 2**64, of all that the index holds.

    The weight of an entry is that of its column times that of its list. So columns are summed first, once for the lists
    that an expanded table repeats, and equal entries give equal digests whatever the strides. Weights are odd: a change
    of any one entry changes the sum.
    """
    rows, num_lists = index.num_vertical.shape
    widths = (index.vertical.shape[2], index.slash.shape[2], 1, 1)
    if rows * num_lists * sum(widths) <= _CACHED_ELEMENTS:
        tables = (index.vertical, index.slash, index.num_vertical.unsqueeze(2), index.num_slash.unsqueeze(2))
        weights = _entry_weights(rows, num_lists, sum(widths), index.vertical.device)
        return (torch.cat(tables, 2) * weights).sum().view(1)
    *columns, lists = _weights(sum(widths) + rows * num_lists, index.vertical.device).split([*widths, rows * num_lists])
    sums = (
        _sum_columns(index.vertical, columns[0])
        + _sum_columns(index.slash, columns[1])
        + index.num_vertical * columns[2]
        + index.num_slash * columns[3]
    )
    return (sums * lists.view(rows, num_lists)).sum().view(1)


@cached_tensors(maxsize=8)
def _entry_weights(rows: int, num_lists: int, width: int, device: torch.device) -> Tensor:
    """int64 ``[rows, num_lists, width]``: the weight of each entry of all tables side by side."""
    columns, lists = _weights(width + rows * num_lists, device).split([width, rows * num_lists])
    return lists.view(rows, num_lists, 1) * columns


def _weights(count: int, device: torch.device) -> Tensor:
    """int64 ``[count]``, odd, and mixed so that products of two of them do not repeat."""
    multiples = torch.arange(1, 2 * count, 2, device=device) * -0x61C8864680B583EB
    return multiples ^ (multiples >> 31 << 1)


def _sum_columns(table: Tensor, weights: Tensor) -> Tensor:
    """int64 ``[rows or 1, num_lists or 1]``: the weighted sum of each list that ``table`` has in memory."""
    for dim in (0, 1):
        if table.stride(dim) == 0:
            table = table.narrow(dim, 0, 1)
    rows_at_once = max(1, _CHUNK_ELEMENTS // max(1, table[0].numel()))
    return torch.cat([(part * weights).sum(2) for part in table.split(rows_at_once)])
