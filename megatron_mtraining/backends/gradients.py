"""What the backward of one device and of a ring have in common: the softmax's delta, and that it has no derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors import accumulate_dtype

_PIECE_ELEMENTS = 1 << 24
"""Elements of a product in the accumulate dtype that are alive at one time: 64 MiB of float32."""


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
    batch, seq, heads, head_dim = out.shape
    delta = out.new_empty((batch, heads, seq), dtype=dtype)
    step = max(1, _PIECE_ELEMENTS // (batch * heads * head_dim))
    for first in range(0, seq, step):
        piece = slice(first, first + step)
        product = grad_out[:, piece].to(dtype) * out[:, piece]
        delta[..., piece] = product.sum(-1).transpose(1, 2)
    return delta if grad_lse is None else delta.sub_(grad_lse)


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Makes the backward of an autograd function refuse a derivative of its results, whoever asks for one.

    ``backward`` takes ``ctx.saved_tensors`` behind ``ctx``: checkpoints of torch let nobody ask for them twice.

    ``torch.autograd.function.once_differentiable`` cuts its results off from the inputs: ``backward`` raises there, and
    ``torch.autograd.grad`` walks past and leaves their share out without a word.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            results = backward(ctx, saved, *gradients)
        if not torch.is_grad_enabled():
            return results
        given = [each for each in (*gradients, *saved) if each is not None and each.requires_grad]
        return tuple(None if each is None else _WithoutDerivative.apply(each, *given) for each in results)

    return run


class _WithoutDerivative(torch.autograd.Function):
    """A gradient, in the graph of all that it was made of."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *given: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "Sparse attention must be differentiated once, got a derivative of its gradients. "
            "Do without it, or use dense attention in PyTorch there."
        )
