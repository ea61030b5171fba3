"""Sparse attention, and its selection alone, on one device or over a ring of context-parallel ranks.

:func:`sparse_attention` validates once, agrees with the other ranks once, scores the keys, posts the first KV blocks,
ranks the keys of each head while these blocks travel, and attends. :func:`select` is the selection alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import compiled
from .config import MTrainingConfig
from .layout import SequenceLayout
from .request import AttentionRequest
from .ring import RingAttention, RingContext, post_kv
from .selection import prepare_selection
from .transport import Groups, as_ring_groups, as_transport
from .transport.agreement import agree_on_plan, announced_errors
from .types import AttentionIndex, AttentionOutput
from .validate import validate_request


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig | None = None,
    *,
    index: AttentionIndex | None = None,
    layout: SequenceLayout | None = None,
    groups: Groups | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    num_valid: Tensor | None = None,
) -> AttentionOutput:
    """Compute causal attention over the selected keys. Differentiable once in query, key and value.

    Under torch.compile a call on one device with a given index is one operator each way; arguments that do not fit
    raise when it runs.
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
        groups: :class:`~megatron_mtraining.RingGroups`, a process group, a DeviceMesh of named dimensions (outer,
            inner), or the rank simulator's; None for one device.
        softmax_scale: factor of the scores; default ``head_dim ** -0.5``.
        cu_seqlens: int32 ``[documents + 1]``, global bounds of packed documents, for batch 1. On the CPU it costs no
            synchronisation.
        num_valid: int32 or int64 ``[batch]``, or with ``cu_seqlens`` ``[documents]``: tokens of each before padding.
            Padding is at the end and chooses no key. Default: no padding. Reading it off a device waits for it.

    Returns:
        ``out`` in the dtype of ``query``, and ``lse`` in float32 (float64 for float64 input). Both are differentiable.

    Raises:
        ValueError: arguments do not fit together; nothing has been computed then.
        BackendUnavailableError: the backend that ``config`` names cannot run.
        RankMismatchError: ranks called with different arguments.
    """
    return attend(
        query,
        key,
        value,
        config,
        index=index,
        layout=layout,
        groups=groups,
        softmax_scale=softmax_scale,
        cu_seqlens=cu_seqlens,
        num_valid=num_valid,
    )


def select(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    groups: Groups | None = None,
    cu_seqlens: Tensor | None = None,
    num_valid: Tensor | None = None,
) -> AttentionIndex:
    """Select the keys of each head, by the pattern and budgets of ``config``; without gradients.

    Documents (batch rows, without ``cu_seqlens``) of up to ``config.dense_below`` tokens keep every key. What the
    others keep is the same for every number of ranks, layout and run. Arguments are those of :func:`sparse_attention`.

    Returns:
        A ``VerticalSlashIndex`` over the global sequence, the same on every rank, with ``num_heads`` lists in a row, or
        with ``index_sharing="kv_group"`` ``num_kv_heads``; or of ``moba`` and ``xattention`` a ``BlockListIndex`` with
        the lists of this rank's query blocks.

    Raises:
        ValueError: arguments do not fit together.
        RankMismatchError: ranks called with different arguments.
    """
    groups = as_ring_groups(groups)
    with announced_errors(as_transport(groups.cp), query, key), torch.no_grad():
        request = validate_request(
            query,
            key,
            None,
            config,
            index=None,
            layout=layout,
            groups=groups,
            softmax_scale=softmax_scale,
            cu_seqlens=cu_seqlens,
            num_valid=num_valid,
        )
        score = prepare_selection(request)
    agree_on_plan(_plan_fields("select", request), request.groups.cp, device=query.device)
    with torch.no_grad():
        return score()()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig | None,
    *,
    index: AttentionIndex | None,
    layout: SequenceLayout | None,
    groups: Groups | None,
    softmax_scale: float | None,
    cu_seqlens: Tensor | None,
    num_valid: Tensor | None,
    on_index: Callable[[AttentionRequest, AttentionIndex], None] | None = None,
) -> AttentionOutput:
    """Do what :func:`sparse_attention` does, and hand the index to ``on_index`` before it is attended with."""
    if (
        torch.compiler.is_compiling()
        and on_index is None
        and compiled.is_one_operator(config, index, layout=layout, groups=groups, num_valid=num_valid)
    ):
        backend = "auto" if config is None else config.backend
        return AttentionOutput(
            *compiled.attention(
                query, key, value, index, softmax_scale=softmax_scale, cu_seqlens=cu_seqlens, backend=backend
            )
        )
    groups = as_ring_groups(groups)
    with announced_errors(as_transport(groups.cp), query, key, value):
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
            num_valid=num_valid,
        )
        score = prepare_selection(request) if index is None else None
        context = RingContext.of(request)
    compared = index if index is not None and index.is_global else None
    fields = _plan_fields("sparse_attention", request, context)
    agree_on_plan(fields, request.groups.cp, device=query.device, index=compared)
    with torch.no_grad():
        rank = None if score is None else score()
        posted = post_kv(key, value, context.schedule, context.groups)
        index = index if rank is None else rank()
    if on_index is not None:
        on_index(request, index)
    # Autograd saves tensors, not an index: the function makes one of them again in its forward and its backward.
    return AttentionOutput(*RingAttention.apply(query, key, value, context, posted, index.rebuild, *index.tensors))


def _plan_fields(operation: str, request: AttentionRequest, context: RingContext | None = None) -> dict[str, object]:
    """Return the values behind :data:`megatron_mtraining.transport.agreement.PLAN_FIELDS`."""
    fields = {
        "operation": operation,
        "query.shape": tuple(request.query.shape),
        "key.shape": tuple(request.key.shape),
        "query.dtype": request.query.dtype,
        "layout": request.layout,
        "softmax_scale": request.softmax_scale,
        "config": request.config if request.index is None else None,
        "index widths": None if request.index is None else request.index.widths,
        "cu_seqlens": None if request.documents is None else request.documents.bounds,
        "num_valid": request.num_valid,
    }
    if context is None:
        return fields
    tensors = request.query, request.key, request.value
    return fields | {
        "requires_grad": torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        "schedule": context.schedule.kind,
        "inner group size": context.schedule.inner_size,
        "backend": context.backend.name,
    }
