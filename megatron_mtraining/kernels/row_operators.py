"""Packing of vertical rows, the way back of their gradients, and the softmax's delta, as torch operators.

Legend as in kernels/operators.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, DTYPES
from .params import (
    current_stream,
    packed_rows,
    row_scalars,
    rows,
    set_keys,
    set_packed,
    set_tables,
)


@torch.library.custom_op("mtraining::pack_vertical", mutates_args=(), device_types="cuda")
def pack_vertical(
    key: Tensor,  # [B, Sk, Hkv, D]
    value: Tensor,
    vertical: Tensor,  # [R, Hq, V]
    num_vertical: Tensor,  # [R, Hq]
    key_slots: Tensor,
    document_tiles: Tensor,
) -> tuple[Tensor, Tensor]:
    """The packed rows ``[R, Hq, V, D]``; zero where a row is padding or not among the keys."""
    packed = [key.new_empty((*vertical.shape, key.shape[3])) for _ in range(2)]
    params = _C.AttentionParams()
    params.device, params.head_dim = key.device.index, key.shape[3]
    params.batch, params.num_heads = key.shape[0], vertical.shape[1]
    set_keys(params, key, value, key_slots)
    set_packed(params, *packed, document_tiles)
    set_tables(params, vertical=vertical, num_vertical=num_vertical)
    with torch.cuda.device(key.device):
        _C.pack_vertical(params, current_stream(key.device))
    return packed[0], packed[1]


@torch.library.custom_op(
    "mtraining::unpack_vertical_grad", mutates_args=("grad_key", "grad_value"), device_types="cuda"
)
def unpack_vertical_grad(
    grad_packed_key: Tensor,  # float32 [R, Hq, V, D]
    grad_packed_value: Tensor,
    vertical: Tensor,
    num_vertical: Tensor,
    key_tiles: Tensor,
    grad_key: Tensor,  # float32 [B, Sk, Hkv, D]
    grad_value: Tensor,
) -> None:
    """Adds the gradients of packed rows to the rows that they were packed from."""
    params = _C.AttentionParams()
    params.device, params.head_dim = grad_key.device.index, grad_key.shape[3]
    params.batch, params.num_kv_heads, params.num_heads = grad_key.shape[0], grad_key.shape[2], vertical.shape[1]
    params.key_tiles, params.num_key_tiles = key_tiles.data_ptr(), key_tiles.shape[0]
    params.grad_packed_key, params.grad_packed_value = packed_rows(grad_packed_key), packed_rows(grad_packed_value)
    params.grad_key, params.grad_value = rows(grad_key), rows(grad_value)
    set_tables(params, vertical=vertical, num_vertical=num_vertical)
    with torch.cuda.device(grad_key.device):
        _C.unpack_vertical_grad(params, current_stream(grad_key.device))


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
    shape = (*vertical.shape, key.shape[3])
    return key.new_empty(shape), value.new_empty(shape)


@unpack_vertical_grad.register_fake
def _(grad_packed_key, grad_packed_value, vertical, num_vertical, key_tiles, grad_key, grad_value):
    return None


@softmax_delta.register_fake
def _(grad_out, out, grad_lse):
    return out.new_empty((out.shape[0], out.shape[2], out.shape[1]), dtype=torch.float32)
