"""The one entry point: sparse attention on one device or over a ring of context-parallel ranks.

:func:`sparse_attention` validates once, agrees with the other ranks once, selects the keys of each head while the first
KV blocks already travel, and attends. :func:`select` is its first half alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .backends.resolve import resolve_backend
from .config import MTrainingConfig
from .layout import SequenceLayout
from .ring import RingAttention, RingContext, post_kv, ring_schedule
from .transport import Group, RingGroups, as_ring_groups, as_transport, resolve_transports
from .transport.agreement import agree_on_plan, announcing_refusal
from .types import AttentionIndex, AttentionOutput
from .validate import AttentionRequest, validate_request


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig | None = None,
    *,
    index: AttentionIndex | None = None,
    layout: SequenceLayout | None = None,
    groups: RingGroups | Group | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> AttentionOutput:
    """Compute causal attention over the selected keys. Differentiable once in query, key and value.

    With ``layout`` and ``groups`` it is a collective, forward and backward: every rank passes its own part of the
    sequence and the same everything else. The result is, to rounding, that of one device on the whole sequence.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``; float64, float32, bfloat16 or float16; any strides. In a ring
            ``seq`` is ``layout.local_len``, this rank's tokens in the order of ``layout``.
        key: ``[batch, seq, num_kv_heads, head_dim]``; head h of ``query`` uses ``h // (num_heads // num_kv_heads)``.
        value: as ``key``.
        config: pattern and budgets of the selection, schedule and backend. Default, beside an ``index``: the defaults.
        index: the keys of each head; selected by ``config`` where it is None. A ``VerticalSlashIndex`` has global
            positions and is the same on every rank; a ``BlockListIndex`` holds the lists of this rank's query blocks.
        layout: rank and slot of each block of the sequence; given together with ``groups``.
        groups: :class:`~megatron_mtraining.RingGroups`, a process group, a DeviceMesh of dimensions (outer, inner), or
            the rank simulator's; None for one device.
        softmax_scale: factor of the scores; default ``head_dim ** -0.5``.
        cu_seqlens: int32 ``[documents + 1]``, global bounds of packed documents, for batch 1. On the CPU it costs no
            synchronisation.

    Returns:
        ``out`` in the dtype of ``query``, and ``lse`` in float32 (float64 for float64 input). Both are differentiable.

    Raises:
        ValueError: arguments do not fit together; nothing has been computed then.
        BackendUnavailableError: the backend that ``config`` names cannot run.
        RankMismatchError: ranks called with different arguments.
    """
    if config is None and index is not None:
        config = _default_config(getattr(index, "block_size", 64))
    groups = as_ring_groups(groups)
    with announcing_refusal(as_transport(groups.cp), query, key, value):
        request = validate_request(
            query,
            key,
            value,
            config,
            index=index,
            layout=layout,
            groups=groups,
            softmax_scale=softmax_scale,
            cu_seqlens=cu_seqlens,
        )
        context = _ring_context(request)
    agree_on_plan(_plan_fields(request, context), context.groups.cp, device=query.device, index=request.compared_index)
    posted = post_kv(key, value, context.schedule, context.groups)
    result = RingAttention.apply(query, key, value, context, posted, request.index.rebuild, *request.index.tensors)
    return AttentionOutput(*result)


def _ring_context(request: AttentionRequest) -> RingContext:
    query, config = request.query, request.config
    transports = resolve_transports(request.groups, config.schedule)
    cp, inner = transports.cp, transports.inner
    return RingContext(
        layout=request.layout,
        documents=request.documents,
        groups=transports,
        schedule=ring_schedule(config.schedule, cp_rank=cp.rank, cp_size=cp.size, inner_size=inner.size),
        backend=resolve_backend(
            config.backend,
            device=query.device,
            dtype=query.dtype,
            head_dim=query.shape[3],
            block_size=config.block_size,
        ),
        softmax_scale=request.softmax_scale,
    )


def _plan_fields(request: AttentionRequest, context: RingContext) -> dict[str, object]:
    """The values behind :data:`megatron_mtraining.transport.agreement.PLAN_FIELDS`."""
    tensors = request.query, request.key, request.value
    return {
        "operation": "sparse_attention",
        "query.shape": tuple(request.query.shape),
        "key.shape": tuple(request.key.shape),
        "query.dtype": request.query.dtype,
        "requires_grad": torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        "layout": request.layout,
        "softmax_scale": request.softmax_scale,
        "schedule": context.schedule.kind,
        "inner group size": context.schedule.inner_size,
        "backend": context.backend.name,
        "index widths": None if request.index is None else request.index.widths,
        "cu_seqlens": None if request.documents is None else request.documents.bounds,
    }


@lru_cache(maxsize=8)
def _default_config(block_size: int) -> MTrainingConfig:
    return MTrainingConfig(block_size=block_size)
