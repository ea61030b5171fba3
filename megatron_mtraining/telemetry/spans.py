"""The tokens that each row of an index speaks for."""

from __future__ import annotations

from torch import Tensor

from ..errors import invalid
from ..types import Documents, VerticalSlashIndex


def row_spans(index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    """``(first token, one past the last)`` of each row: the whole sequence, or with ``cu_seqlens`` a document.

    Raises:
        ValueError: ``cu_seqlens`` is not valid, or names other than ``index.rows`` documents.
    """
    if cu_seqlens is None:
        return [(0, seq_len)] * index.rows
    documents = Documents.from_cu_seqlens(cu_seqlens, seq_len=seq_len)
    if documents.count != index.rows:
        raise invalid("index.rows", f"the {documents.count} documents of cu_seqlens", index.rows)
    return documents.spans
