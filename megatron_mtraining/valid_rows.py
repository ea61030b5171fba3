"""The rows of batch rows and documents that are not padding, as host integers and on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import invalid
from .tensors import to_device
from .types import Documents

Spans = tuple[tuple[int, int], ...]
"""First token and one past the last of every batch row, or of every document."""


def checked_counts(num_valid: Tensor | None, spans: Spans) -> tuple[int, ...] | None:
    """Return the counts of ``num_valid`` on the host, which waits where they are on a device; None without padding.

    Args:
        num_valid: int32 or int64 ``[batch or documents]``.
        spans: of the same, with their padding.

    Raises:
        ValueError: another type or shape, or a count that is negative or longer than its row.
    """
    if num_valid is None:
        return None
    if not isinstance(num_valid, Tensor) or num_valid.dtype not in (torch.int32, torch.int64):
        got = num_valid.dtype if isinstance(num_valid, Tensor) else type(num_valid).__name__
        raise invalid("num_valid", "an int32 or int64 tensor", got)
    if num_valid.shape != (len(spans),):
        raise invalid("num_valid", f"of shape ({len(spans)},), a count for each row", tuple(num_valid.shape))
    counts = tuple(num_valid.tolist())
    for row, (count, (start, stop)) in enumerate(zip(counts, spans, strict=True)):
        if not 0 <= count <= stop - start:
            raise invalid(f"num_valid[{row}]", f"between 0 and {stop - start}, the tokens of its row", count)
    return None if all(count == stop - start for count, (start, stop) in zip(counts, spans, strict=True)) else counts


def valid_spans(spans: Spans, num_valid: tuple[int, ...] | None) -> Spans:
    """Return ``spans`` without the padding at their ends."""
    if num_valid is None:
        return spans
    return tuple((start, start + count) for (start, _), count in zip(spans, num_valid, strict=True))


def is_text(positions: Tensor, documents: Documents | None, spans: Spans) -> Tensor:
    """bool: True for global positions that are not padding.

    Args:
        positions: int64 ``[tokens]``.
        documents: where they are packed.
        spans: of the documents, without padding; or of batch rows that are all alike.
    """
    if documents is None:
        return positions < spans[0][1]
    bounds = to_device(torch.tensor(documents.bounds[1:], device="cpu"), positions.device)
    stops = to_device(torch.tensor([stop for _, stop in spans], device="cpu"), positions.device)
    return positions < stops[torch.searchsorted(bounds, positions, right=True).clamp_(max=documents.count - 1)]
