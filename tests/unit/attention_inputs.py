"""Random indices and tensors for the tests of attention."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_mtraining.types import VerticalSlashIndex


def random_index(
    rows: int,
    num_heads: int,
    seq_len: int,
    block_size: int,
    *,
    cu_seqlens: Sequence[int] | None = None,
    max_vertical: int | None = None,
    max_slash: int | None = None,
) -> VerticalSlashIndex:
    """An index whose lists differ in length and content for every row and head; some verticals lie inside slashes."""
    num_blocks = -(-seq_len // block_size)
    vertical, slash = [], []
    for row in range(rows):
        low, high = (0, seq_len) if cu_seqlens is None else cu_seqlens[row : row + 2]
        most_vertical = min(high - low, 4 + seq_len // 8 if max_vertical is None else max_vertical)
        most_slash = num_blocks // 2 if max_slash is None else min(max_slash, num_blocks)
        vertical.append([random.sample(range(low, high), random.randint(0, most_vertical)) for _ in range(num_heads)])
        slash.append([[0, *random.sample(range(num_blocks), random.randint(0, most_slash))] for _ in range(num_heads)])
    return VerticalSlashIndex.from_lists(vertical, slash, seq_len=seq_len, block_size=block_size)


def random_inputs(
    batch: int, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal query, key and value."""
    shapes = ((batch, seq_len, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    query, key, value = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return query, key, value


def as_cu_seqlens(bounds: Sequence[int] | None) -> Tensor | None:
    """``bounds`` as the int32 tensor that the public functions take."""
    return None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
