"""Packing of vertical rows, unpacking of their gradients, and the softmax's delta, as torch operators.

Legend as in backends/cuda/operators.py; ``L`` lists in an index row, one for a query head or for a key/value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, DTYPES
from .params import current_stream, of_key_gradients, of_keys, of_packed, of_tables
from .registration import operator


def _empty_packed(key: Tensor, value: Tensor, vertical: Tensor, *others: Tensor) -> Tensor:
    return key.new_empty((2, *vertical.shape, key.shape[3]))


@operator(fake=_empty_packed)
def pack_vertical(
    key: Tensor,  # [B, Sk, Hkv, D]
    value: Tensor,
    vertical: Tensor,  # [R, L, V]
    num_vertical: Tensor,  # [R, L]
    key_slots: Tensor,
    document_tiles: Tensor,
) -> Tensor:
    """Pack the rows ``[2, R, L, V, D]`` of key and of value; zero where one is padding or not among the keys."""
    packed = _empty_packed(key, value, vertical)
    device, batch = key.get_device(), key.shape[0]
    params = _C.AttentionParams(
        **of_keys(key, value, key_slots),
        **of_packed(packed, document_tiles),
        **of_tables(batch, vertical=vertical, num_vertical=num_vertical),
        device=device,
        batch=batch,
        head_dim=key.shape[3],
    )
    with torch.cuda.device(device):
        _C.pack_vertical(params, current_stream(device))
    return packed


def _empty_total(grad_packed, vertical, num_vertical, key_tiles, grad_keys: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad_keys, dtype=dtype)


@operator(fake=_empty_total)
def unpack_vertical_grad(
    grad_packed: Tensor,  # float32 [2, R, L, V, D]: of key, of value
    vertical: Tensor,
    num_vertical: Tensor,
    key_tiles: Tensor,
    grad_keys: Tensor,  # float32 [2, B, Sk, Hkv, D]
    dtype: torch.dtype,
) -> Tensor:
    """Return ``grad_keys`` in ``dtype`` plus the gradients of packed rows, each added to the row it was packed from."""
    total = torch.empty_like(grad_keys, dtype=dtype)
    _, batch, _, num_kv_heads, head_dim = total.shape
    device = total.get_device()
    params = _C.AttentionParams(
        **of_key_gradients(grad_keys, key_tiles),
        **of_tables(batch, vertical=vertical, num_vertical=num_vertical),
        device=device,
        dtype=DTYPES[dtype],
        batch=batch,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        grad_packed=grad_packed,
        final_grad_keys=total,
    )
    with torch.cuda.device(device):
        _C.unpack_vertical_grad(params, current_stream(device))
    return total


def _empty_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    batch, seq_q, num_heads, _ = out.shape
    return out.new_empty((batch, num_heads, seq_q), dtype=torch.float32)


@operator(fake=_empty_delta)
def softmax_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Compute ``sum(grad_out * out) - grad_lse``, float32 ``[B, Hq, Sq]``."""
    batch, seq_q, num_heads, head_dim = out.shape
    delta = _empty_delta(grad_out, out, grad_lse)
    device = out.get_device()
    params = _C.DeltaParams(
        device=device,
        dtype=DTYPES[out.dtype],
        batch=batch,
        seq=seq_q,
        num_heads=num_heads,
        head_dim=head_dim,
        grad_out=grad_out,
        out=out,
        grad_lse=grad_lse,
        delta=delta,
    )
    with torch.cuda.device(device):
        _C.softmax_delta(params, current_stream(device))
    return delta
