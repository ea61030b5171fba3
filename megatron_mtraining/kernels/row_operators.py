"""Packing of vertical rows, the way back of their gradients, and the softmax's delta, as torch operators.

Legend as in kernels/operators.py; ``L`` lists in an index row, one for a query head or for a key/value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, DTYPES
from .params import (
    current_stream,
    row_scalars,
    rows,
    set_key_gradients,
    set_keys,
    set_packed,
    set_packed_gradients,
    set_results,
    set_tables,
)


@torch.library.custom_op("mtraining::pack_vertical", mutates_args=(), device_types="cuda")
def pack_vertical(
    key: Tensor,  # [B, Sk, Hkv, D]
    value: Tensor,
    vertical: Tensor,  # [R, L, V]
    num_vertical: Tensor,  # [R, L]
    key_slots: Tensor,
    document_tiles: Tensor,
) -> Tensor:
    """The packed rows ``[2, R, L, V, D]`` of key and of value; zero where one is padding or not among the keys."""
    packed = key.new_empty((2, *vertical.shape, key.shape[3]))
    params = _C.AttentionParams()
    params.device, params.head_dim = key.device.index, key.shape[3]
    params.batch = key.shape[0]
    set_keys(params, key, value, key_slots)
    set_packed(params, packed, document_tiles)
    set_tables(params, vertical=vertical, num_vertical=num_vertical)
    with torch.cuda.device(key.device):
        _C.pack_vertical(params, current_stream(key.device))
    return packed


@torch.library.custom_op("mtraining::unpack_vertical_grad", mutates_args=(), device_types="cuda")
def unpack_vertical_grad(
    grad_packed: Tensor,  # float32 [2, R, L, V, D]: of key, of value
    vertical: Tensor,
    num_vertical: Tensor,
    key_tiles: Tensor,
    grad_keys: Tensor,  # float32 [2, B, Sk, Hkv, D]
    dtype: torch.dtype,
) -> Tensor:
    """``grad_keys`` and the gradients of packed rows, added to the rows that they were packed from, in ``dtype``."""
    total = torch.empty_like(grad_keys, dtype=dtype)
    params = _C.AttentionParams()
    params.device, params.dtype, params.head_dim = total.device.index, DTYPES[dtype], total.shape[4]
    params.batch, params.num_kv_heads = total.shape[1], total.shape[3]
    set_key_gradients(params, grad_keys, key_tiles)
    set_packed_gradients(params, grad_packed)
    set_results(params, final_grad_key=total[0], final_grad_value=total[1])
    set_tables(params, vertical=vertical, num_vertical=num_vertical)
    with torch.cuda.device(total.device):
        _C.unpack_vertical_grad(params, current_stream(total.device))
    return total


@torch.library.custom_op("mtraining::softmax_delta", mutates_args=(), device_types="cuda")
def softmax_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """``sum(grad_out * out) - grad_lse``, float32 ``[B, Hq, Sq]``."""
    batch, seq_q, num_heads, head_dim = out.shape
    delta = torch.empty((batch, num_heads, seq_q), dtype=torch.float32, device=out.device)
    params = _C.DeltaParams()
    params.device, params.dtype = out.device.index, DTYPES[out.dtype]
    params.batch, params.seq, params.num_heads, params.head_dim = batch, seq_q, num_heads, head_dim
    params.grad_out, params.out, params.delta = rows(grad_out), rows(out), row_scalars(delta)
    if grad_lse is not None:
        params.grad_lse = row_scalars(grad_lse)
    with torch.cuda.device(out.device):
        _C.softmax_delta(params, current_stream(out.device))
    return delta


@pack_vertical.register_fake
def _(key, value, vertical, num_vertical, key_slots, document_tiles):
    return key.new_empty((2, *vertical.shape, key.shape[3]))


@unpack_vertical_grad.register_fake
def _(grad_packed, vertical, num_vertical, key_tiles, grad_keys, dtype):
    return torch.empty_like(grad_keys, dtype=dtype)


@softmax_delta.register_fake
def _(grad_out, out, grad_lse):
    return out.new_empty((out.shape[0], out.shape[2], out.shape[1]), dtype=torch.float32)
