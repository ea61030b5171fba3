"""Tokens that each row of an index speaks for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import invalid
from ..types import Documents, VerticalSlashIndex
from ..valid_rows import checked_counts, valid_spans


def row_spans(
    index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None, num_valid: Tensor | None = None
) -> tuple[tuple[int, int], ...]:
    """Return ``(first token, one past the last)`` of each row: the whole sequence, or with ``cu_seqlens`` a document.

    Raises:
        ValueError: ``cu_seqlens`` is not valid, or names other than ``index.rows`` documents.
    """
    spans = spans_of(index.rows, seq_len=seq_len, cu_seqlens=cu_seqlens, num_valid=num_valid)
    if len(spans) != index.rows:
        raise invalid("index.rows", f"the {len(spans)} documents of cu_seqlens", index.rows)
    return spans


def spans_of(
    batch: int, *, seq_len: int, cu_seqlens: Tensor | None, num_valid: Tensor | None = None
) -> tuple[tuple[int, int], ...]:
    """Return the same of ``batch`` rows, or of the documents in ``cu_seqlens``; of each the first ``num_valid``.

    Raises:
        ValueError: ``cu_seqlens`` or ``num_valid`` is not valid.
    """
    whole = ((0, seq_len),) * batch
    if cu_seqlens is not None:
        whole = Documents.from_cu_seqlens(cu_seqlens, seq_len=seq_len).spans
    return valid_spans(whole, checked_counts(num_valid, whole))


def tokens_per_block(start: int, stop: int, *, block_size: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 ``[blocks]`` on ``device``: number of the tokens ``start`` to ``stop - 1`` that lie in each block.

    The blocks are those that the span touches, from ``start // block_size`` on; none where it is empty.
    """
    if start == stop:
        return torch.zeros(0, dtype=torch.int64, device=device)
    edges = torch.arange(start // block_size, (stop - 1) // block_size + 2, device=device) * block_size
    return edges.clamp(start, stop).diff()
