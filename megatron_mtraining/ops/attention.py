"""Sparse attention on one device, differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..types import AttentionIndex, AttentionOutput, BlockListIndex
from .backend import AttentionBackend
from .backends import resolve_backend
from .geometry import BlockGeometry
from .gradients import differentiable_once
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

    Under torch.compile one operator each way, which takes no graph apart; what does not fit raises when it runs.

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
    if torch.compiler.is_compiling():
        from . import compiled  # which is made of this module

        options = {"softmax_scale": softmax_scale, "cu_seqlens": cu_seqlens, "backend": backend}
        return AttentionOutput(*compiled.attention(query, key, value, index, **options))
    plan = plan_call(
        query,
        key,
        value,
        index,
        softmax_scale=softmax_scale,
        cu_seqlens=cu_seqlens,
        backend=backend,
        deterministic=deterministic,
    )
    return AttentionOutput(*_SparseAttention.apply(query, key, value, plan, *index.tensors))


def plan_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: AttentionIndex,
    *,
    softmax_scale: float | None,
    cu_seqlens: Tensor | None,
    backend: str,
    deterministic: bool = False,
) -> _Plan:
    """Checks a call of :func:`vertical_slash_attention`, and finds what its forward and backward share.

    Raises:
        ValueError: inputs do not fit together.
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
    return _Plan(geometry, call.softmax_scale, resolved, index.rebuild)


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
        out, lse = forward_of(plan, query, key, value, lists)
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
        return *backward_of(ctx.plan, grad_out, grad_lse, query, key, value, out, lse, lists), *none


def forward_of(
    plan: _Plan, query: Tensor, key: Tensor, value: Tensor, lists: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """The output and its lse, of tensors that record no gradient."""
    geometry, backend, options = plan.geometry, plan.backend, {"softmax_scale": plan.softmax_scale, "is_last": True}
    index = plan.rebuild_index(*lists)
    if isinstance(index, BlockListIndex):
        return backend.slash_forward(query, key, value, index, geometry, previous=None, **options)
    packed = backend.pack_vertical(key, value, index, geometry)
    return backend.forward(query, key, value, packed, index, geometry, **options)


def backward_of(
    plan: _Plan,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lists: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; at least one of ``grad_out`` and ``grad_lse`` is given."""
    geometry, backend, options = plan.geometry, plan.backend, {"softmax_scale": plan.softmax_scale, "is_last": True}
    index = plan.rebuild_index(*lists)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    delta = backend.softmax_delta(grad_out, out, grad_lse)
    if isinstance(index, BlockListIndex):
        grad_query, grad_keys = backend.slash_backward(
            grad_out, query, key, value, lse, delta, index, geometry, previous=None, **options
        )
        return grad_query, *grad_keys.to(query.dtype)
    packed = backend.pack_vertical(key, value, index, geometry)
    grad_query, grad_keys, grad_packed = backend.backward(
        grad_out, query, key, value, packed, lse, delta, index, geometry, **options
    )
    grads = backend.unpack_vertical_grad(grad_packed, index, geometry, grad_keys=grad_keys, dtype=query.dtype)
    return grad_query, *grads
