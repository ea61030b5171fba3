"""Guard against second derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make a derivative of the results of an autograd function's ``backward`` raise.

    ``backward`` takes ``ctx.saved_tensors`` behind ``ctx``: under torch's checkpoints they can be read only once.

    ``torch.autograd.function.once_differentiable`` cuts its results off from the inputs: ``backward`` raises there, and
    ``torch.autograd.grad`` silently leaves their share out.
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
    """A gradient, in the graph of all tensors that it was computed from."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *given: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "Sparse attention must be differentiated once, got a derivative of its gradients. "
            "Do without it, or use dense attention in PyTorch there."
        )
