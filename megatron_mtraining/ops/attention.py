"""Vertical-slash attention on one device, differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..types import AttentionOutput, VerticalSlashIndex
from .backend import AttentionBackend
from .backends import resolve_backend
from .geometry import BlockGeometry
from .validate import check_attention_inputs


def vertical_slash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: VerticalSlashIndex,
    *,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> AttentionOutput:
    """Causal attention over the keys that ``index`` keeps. Differentiable once in query, key and value.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``; float64, float32, bfloat16 or float16; any strides.
        key: ``[batch, seq, num_kv_heads, head_dim]``; head h of ``query`` uses ``h // (num_heads // num_kv_heads)``.
        value: as ``key``.
        index: what each query head keeps; a row for each batch row, or for each document.
        softmax_scale: what scores are multiplied with; default ``head_dim ** -0.5``.
        cu_seqlens: int32 ``[documents + 1]``: bounds of packed documents, for batch 1.
        deterministic: gradients that repeat bit for bit, whatever the backend.
        backend: ``auto``, ``reference`` or ``cuda``; a named one never falls back.

    Returns:
        ``out`` in the dtype of ``query``, and ``lse`` in float32 (float64 for float64 input). Both are differentiable.

    Raises:
        ValueError: inputs do not fit together; nothing has been computed then.
        BackendUnavailableError: the named backend cannot run.
    """
    seq_len = query.shape[1] if query.dim() == 4 else 0
    call = check_attention_inputs(
        query, key, value, index, seq_len=seq_len, softmax_scale=softmax_scale, cu_seqlens=cu_seqlens
    )
    resolved = resolve_backend(
        backend,
        device=query.device,
        dtype=query.dtype,
        head_dim=query.shape[3],
        block_size=index.block_size,
        deterministic=deterministic,
    )
    geometry = BlockGeometry.whole(seq_len=seq_len, block_size=index.block_size, documents=call.documents)
    plan = _Plan(geometry, call.softmax_scale, resolved)
    lists = (index.vertical, index.num_vertical, index.slash, index.num_slash)
    return AttentionOutput(*_VerticalSlashAttention.apply(query, key, value, *lists, plan))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What forward and backward share beside tensors."""

    geometry: BlockGeometry
    softmax_scale: float
    backend: AttentionBackend


class _VerticalSlashAttention(torch.autograd.Function):
    """The steps of DESIGN.md on one device: pack, one step over all pairs; and the same ones backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        vertical: Tensor,
        num_vertical: Tensor,
        slash: Tensor,
        num_slash: Tensor,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        geometry, backend, scale = plan.geometry, plan.backend, plan.softmax_scale
        index = VerticalSlashIndex(vertical, num_vertical, slash, num_slash, block_size=geometry.block_size)
        packed = backend.pack_vertical(key, value, index, geometry)
        out, lse = backend.forward(query, key, value, packed, index, geometry, softmax_scale=scale, is_last=True)
        ctx.save_for_backward(query, key, value, out, lse, vertical, num_vertical, slash, num_slash)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *lists = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * 8
        geometry, backend, scale = ctx.plan.geometry, ctx.plan.backend, ctx.plan.softmax_scale
        index = VerticalSlashIndex(*lists, block_size=geometry.block_size)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        delta = backend.softmax_delta(grad_out, out, grad_lse)
        packed = backend.pack_vertical(key, value, index, geometry)
        grad_query, grad_keys, grad_packed = backend.backward(
            grad_out, query, key, value, packed, lse, delta, index, geometry, softmax_scale=scale, is_last=True
        )
        grad_key, grad_value = backend.unpack_vertical_grad(
            grad_packed, index, geometry, grad_keys=grad_keys, dtype=query.dtype
        )
        return grad_query, grad_key, grad_value, None, None, None, None, None
