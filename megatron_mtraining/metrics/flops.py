"""Useful floating-point operations of attention: those of the kept pairs, however many a kernel issues."""

from __future__ import annotations

from torch import Tensor


def forward_flops(pairs: int | Tensor, *, head_dim: int) -> int | Tensor:
    """``4 * pairs * head_dim``: two products, scores and output, of a multiply and an add each.

    Args:
        pairs: (query, key) pairs, added up over heads and rows; see :func:`megatron_mtraining.metrics.computed_pairs`.
        head_dim: elements in a query.
    """
    return 4 * pairs * head_dim


def backward_flops(pairs: int | Tensor, *, head_dim: int) -> int | Tensor:
    """``10 * pairs * head_dim``: five products; the scores again, and the gradients of p, value, query and key."""
    return 10 * pairs * head_dim


def model_flops(pairs: int | Tensor, *, head_dim: int) -> int | Tensor:
    """``12 * pairs * head_dim``: a training step as Megatron counts it, the forward products once and twice again.

    What a backward computes anew is left out: the scores, and the whole forward where activations are recomputed.
    """
    return 3 * forward_flops(pairs, head_dim=head_dim)
