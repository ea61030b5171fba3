"""Spans of the texts that an attention mask of transformers holds: packed texts, and runs of padding between them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidError

_ATTRIBUTE = "_mtraining_spans"

Span = tuple[int, int]
"""First token of a text, and the token behind its last one."""


def text_spans(mask: Tensor, seq_len: int) -> tuple[tuple[Span, ...], ...]:
    """Return for each batch row the spans of its texts, ascending; what lies between them is padding.

    A row of the mask that does not see its own token is padding. The host waits for the device once for each mask: all
    layers are handed the same one.

    Args:
        mask: bool ``[batch, 1, seq, seq]``, True where a query sees a key.
        seq_len: tokens in each batch row.

    Raises:
        ValueError: it is not causal inside texts that follow each other.
    """
    spans = getattr(mask, _ATTRIBUTE, None)
    if spans is None:
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, seq_len, seq_len):
            raise _unsupported(f"{mask.dtype} of shape {tuple(mask.shape)}")
        spans = tuple(_spans_of_row(row[0]) for row in mask)
        setattr(mask, _ATTRIBUTE, spans)
    return spans


def _spans_of_row(mask: Tensor) -> tuple[Span, ...]:
    """Return the spans of one batch row, ``[seq, seq]``."""
    seq_len = len(mask)
    position = torch.arange(seq_len, device=mask.device)
    is_text = mask.diagonal()
    first = torch.where(is_text, mask.byte().argmax(1), seq_len)
    # Every key from the first to the query's own, and no other: their number, and none behind it.
    is_causal = (mask.sum(1) == position + 1 - first) & ~mask.triu(1).any(1)
    starts = torch.cat([first.new_ones(1, dtype=torch.bool), first.diff() != 0])
    starts_at_itself = ~starts | (first == position)
    facts = torch.stack([starts, ~is_text | (is_causal & starts_at_itself), is_text]).cpu()
    if not facts[1].all():
        raise _unsupported("one that is not causal inside documents or padding")
    bounds = [*facts[0].nonzero().flatten().tolist(), seq_len]
    return tuple((start, stop) for start, stop in zip(bounds, bounds[1:], strict=False) if facts[2, start])


def _unsupported(found: str) -> InvalidError:
    remedy = "Give causal attention, with padding or packed documents alone, or use attn_implementation='sdpa'."
    return InvalidError(f"unsupported: attn_implementation='mtraining' with an attention mask, {found}. {remedy}")
