"""Combination of attention over disjoint keys: the log-sum-exp weighted mean of two partial results."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import invalid
from ..types import AttentionOutput


def merge_partials(a: AttentionOutput, b: AttentionOutput) -> AttentionOutput:
    """Return attention over the union of two disjoint sets of keys, from the attention over each.

    A row whose ``lse`` is -inf saw no key: its ``out`` is not read, whatever it holds, and receives no gradient. A row
    that is empty in both gives ``out`` 0 and ``lse`` -inf. Differentiable in all four tensors, without NaN in any case.

    Args:
        a: ``out`` ``[batch, seq, num_heads, head_dim]`` and ``lse`` ``[batch, num_heads, seq]`` over some keys.
        b: the same queries over other keys.

    Returns:
        ``out`` in the wider dtype of the two ``out``, computed and with ``lse`` in the wider dtype of the two ``lse``.

    Raises:
        ValueError: the shapes of the two do not agree.
    """
    _check_shapes(a, b)
    empty = (a.lse == -torch.inf) & (b.lse == -torch.inf)
    # The peak only shifts the exponents, so it is a constant to autograd; 0 keeps -inf - -inf out of empty rows.
    peak = torch.maximum(a.lse, b.lse).detach().masked_fill(empty, 0.0)
    weight_a, weight_b = torch.exp(a.lse - peak), torch.exp(b.lse - peak)
    total = (weight_a + weight_b).masked_fill(empty, 1.0)
    lse = (peak + torch.log(total)).masked_fill(empty, -torch.inf)
    out = _share(a, weight_a / total) + _share(b, weight_b / total)
    return AttentionOutput(out.to(torch.promote_types(a.out.dtype, b.out.dtype)), lse)


def _share(partial: AttentionOutput, weight: Tensor) -> Tensor:
    """Return ``weight * out``, with 0 for the ``out`` of empty rows, so that garbage there meets no arithmetic."""
    is_empty = (partial.lse == -torch.inf).transpose(1, 2).unsqueeze(-1)
    return partial.out.masked_fill(is_empty, 0.0) * weight.transpose(1, 2).unsqueeze(-1)


def _check_shapes(a: AttentionOutput, b: AttentionOutput) -> None:
    if a.out.dim() != 4:
        raise invalid("a.out", "of shape [batch, seq, num_heads, head_dim]", tuple(a.out.shape))
    batch, seq, heads, _ = a.out.shape
    if b.out.shape != a.out.shape:
        raise invalid("b.out", f"of the shape {tuple(a.out.shape)} that a.out has", tuple(b.out.shape))
    for name, lse in (("a.lse", a.lse), ("b.lse", b.lse)):
        if lse.shape != (batch, heads, seq):
            raise invalid(name, f"of shape {(batch, heads, seq)}, [batch, num_heads, seq]", tuple(lse.shape))
