"""Sparse attention on one device, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .backends.geometry import BlockGeometry
from .backends.gradients import differentiable_once
from .backends.protocol import AttentionBackend
from .backends.resolve import resolve_backend
from .types import AttentionIndex, AttentionOutput, BlockListIndex
from .validate import check_attention_inputs, check_kinds


def vertical_slash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: AttentionIndex,
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
        index: what each query head keeps: a row for each batch row, or for each document; or the lists of all blocks.
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
    check_kinds(query, index)
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
    plan = _Plan(geometry, call.softmax_scale, resolved, index.rebuild)
    return AttentionOutput(*_SparseAttention.apply(query, key, value, plan, *index.tensors))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What forward and backward share beside tensors."""

    geometry: BlockGeometry
    softmax_scale: float
    backend: AttentionBackend
    rebuild_index: Callable[..., AttentionIndex]


class _SparseAttention(torch.autograd.Function):
    """The steps of DESIGN.md on one device: pack, one step over all pairs; and the same ones backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, plan: _Plan, *lists: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        geometry, backend, options = plan.geometry, plan.backend, {"softmax_scale": plan.softmax_scale, "is_last": True}
        index = plan.rebuild_index(*lists)
        if isinstance(index, BlockListIndex):
            out, lse = backend.slash_forward(query, key, value, index, geometry, previous=None, **options)
        else:
            packed = backend.pack_vertical(key, value, index, geometry)
            out, lse = backend.forward(query, key, value, packed, index, geometry, **options)
        ctx.save_for_backward(query, key, value, out, lse, *lists)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor | None, ...], grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *lists = saved
        none = (None,) * (1 + len(lists))
        if grad_out is None and grad_lse is None:
            return None, None, None, *none
        geometry, backend = ctx.plan.geometry, ctx.plan.backend
        options = {"softmax_scale": ctx.plan.softmax_scale, "is_last": True}
        index = ctx.plan.rebuild_index(*lists)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        delta = backend.softmax_delta(grad_out, out, grad_lse)
        if isinstance(index, BlockListIndex):
            grad_query, grad_keys = backend.slash_backward(
                grad_out, query, key, value, lse, delta, index, geometry, previous=None, **options
            )
            return grad_query, *grad_keys.to(query.dtype), *none
        packed = backend.pack_vertical(key, value, index, geometry)
        grad_query, grad_keys, grad_packed = backend.backward(
            grad_out, query, key, value, packed, lse, delta, index, geometry, **options
        )
        grads = backend.unpack_vertical_grad(grad_packed, index, geometry, grad_keys=grad_keys, dtype=query.dtype)
        return grad_query, *grads, *none
