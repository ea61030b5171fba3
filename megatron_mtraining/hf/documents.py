"""Bounds of the documents that an attention mask of transformers holds: packed texts, and runs of padding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidError

_ATTRIBUTE = "_mtraining_bounds"


def document_bounds(mask: Tensor, seq_len: int) -> tuple[tuple[int, ...], ...]:
    """Return for each batch row the bounds of its documents, as ``cu_seqlens`` has them.

    A row of the mask that does not see its own token is padding; neighbours of padding are one document, whose result
    nobody reads. The host waits for the device once for each mask: all layers are handed the same one.

    Args:
        mask: bool ``[batch, 1, seq, seq]``, True where a query sees a key.
        seq_len: tokens in each batch row.

    Raises:
        ValueError: it is not causal inside documents that follow each other.
    """
    bounds = getattr(mask, _ATTRIBUTE, None)
    if bounds is None:
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, seq_len, seq_len):
            raise _unsupported(f"{mask.dtype} of shape {tuple(mask.shape)}")
        bounds = tuple(_bounds_of_row(row[0]) for row in mask)
        setattr(mask, _ATTRIBUTE, bounds)
    return bounds


def _bounds_of_row(mask: Tensor) -> tuple[int, ...]:
    """Return the bounds of one batch row, ``[seq, seq]``."""
    seq_len = len(mask)
    position = torch.arange(seq_len, device=mask.device)
    is_text = mask.diagonal()
    first = torch.where(is_text, mask.byte().argmax(1), seq_len)
    # Every key from the first to the query's own, and no other: their number, and none behind it.
    is_causal = (mask.sum(1) == position + 1 - first) & ~mask.triu(1).any(1)
    starts = torch.cat([first.new_ones(1, dtype=torch.bool), first.diff() != 0])
    starts_at_itself = ~starts | (first == position)
    facts = torch.stack([starts, ~is_text | (is_causal & starts_at_itself)]).cpu()
    if not facts[1].all():
        raise _unsupported("one that is not causal inside documents or padding")
    return (*facts[0].nonzero().flatten().tolist(), seq_len)


def _unsupported(found: str) -> InvalidError:
    remedy = "Give causal attention, with padding or packed documents alone, or use attn_implementation='sdpa'."
    return InvalidError(f"unsupported: attn_implementation='mtraining' with an attention mask, {found}. {remedy}")
