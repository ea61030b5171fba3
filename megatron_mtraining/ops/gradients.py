"""What the backward of one device and of a ring have in common: where gradients are summed, and the softmax's delta."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import accumulate_dtype


def zero_accumulators(*tensors: Tensor) -> tuple[Tensor, ...]:
    """A contiguous tensor of zeros for each of ``tensors``, of its shape, in the accumulate dtype."""
    return tuple(tensor.new_zeros(tensor.shape, dtype=accumulate_dtype(tensor.dtype)) for tensor in tensors)


def softmax_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """What a row's probabilities subtract from their gradient: ``sum(grad_out * out) - grad_lse``.

    Args:
        grad_out: ``[batch, seq, num_heads, head_dim]``.
        out: of that shape, the output over all keys.
        grad_lse: ``[batch, num_heads, seq]``, or None where ``lse`` was not used.

    Returns:
        ``[batch, num_heads, seq]``, contiguous, in the accumulate dtype.
    """
    dtype = accumulate_dtype(grad_out.dtype)
    delta = torch.einsum("bshd,bshd->bhs", grad_out.to(dtype), out.to(dtype))
    return (delta if grad_lse is None else delta - grad_lse).contiguous()
