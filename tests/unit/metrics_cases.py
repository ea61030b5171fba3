"""Random indices over awkward lengths and documents, for the tests of what is counted on them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mtraining.types import VerticalSlashIndex

CASES = [
    # seq_len, block_size, cu_seqlens
    (1, 4, None),
    (4, 4, None),
    (5, 4, None),
    (64, 8, None),
    (77, 8, None),
    (130, 64, None),
    (40, 4, [0, 40]),
    (57, 4, [0, 9, 17, 25, 37, 45, 57]),
    (57, 8, [0, 0, 1, 2, 30, 31, 31, 57, 57]),
    (90, 16, [0, 3, 19, 90]),
]


def random_index(
    seq_len: int, block_size: int, bounds: list[int] | None, *, num_heads: int = 3, rows: int = 2
) -> VerticalSlashIndex:
    """Each head keeps some verticals of its own row and some distances, near or beyond what the row reaches."""
    spans = [(0, seq_len)] * rows if bounds is None else list(zip(bounds[:-1], bounds[1:], strict=True))
    num_blocks = -(-seq_len // block_size)
    vertical, slash = [], []
    for start, stop in spans:
        keep = torch.rand(num_heads, 1)
        columns = torch.rand(num_heads, stop - start) < keep
        distances = torch.rand(num_heads, num_blocks) < keep
        vertical.append([[start + int(c) for c in row.nonzero()] for row in columns])
        slash.append([[0, *(int(d) for d in row.nonzero())] for row in distances])
    return VerticalSlashIndex.from_lists(vertical, slash, seq_len=seq_len, block_size=block_size)


def with_garbage(index: VerticalSlashIndex) -> VerticalSlashIndex:
    """The same index, two entries wider, with entries behind the counts that would keep more if they were read."""

    def widened(entries: Tensor, counts: Tensor) -> Tensor:
        wide = torch.cat((entries, torch.zeros_like(entries[..., :1]).expand(*entries.shape[:2], 2)), dim=-1)
        garbage = torch.randint(0, 6, wide.shape, dtype=torch.int32)
        return wide.where(torch.arange(wide.shape[-1]) < counts.unsqueeze(-1), garbage)

    return VerticalSlashIndex(
        widened(index.vertical, index.num_vertical),
        index.num_vertical,
        widened(index.slash, index.num_slash),
        index.num_slash,
        block_size=index.block_size,
    )
