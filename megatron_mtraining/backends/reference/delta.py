"""The softmax's delta, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ...tensors import accumulate_dtype

_PIECE_ELEMENTS = 1 << 24
"""Elements of a product in the accumulate dtype that are alive at one time: 64 MiB of float32."""


def softmax_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Return ``sum(grad_out * out, -1) - grad_lse``, which a row's probabilities subtract from their gradient.

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
