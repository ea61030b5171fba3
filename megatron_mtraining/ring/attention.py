"""Sparse attention over a sequence that is spread over context-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.resolve import resolve_backend
from ..errors import invalid
from ..layout import SequenceLayout, check_layout
from ..layout.blocks import blocks_of
from ..transport import Group, Transport, as_transport
from ..transport.agreement import agree_on_plan, announcing_refusal
from ..types import AttentionIndex, AttentionOutput, BlockListIndex
from ..validate import check_attention_inputs, check_kinds
from .autograd import RingAttention
from .plan import RingPlan
from .start import RingStart


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: AttentionIndex,
    *,
    layout: SequenceLayout,
    cp_group: Group,
    inner_group: Group | None = None,
    outer_group: Group | None = None,
    inner_gradient_group: Group | None = None,
    outer_gradient_group: Group | None = None,
    schedule: str = "hierarchical",
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    start: RingStart | None = None,
) -> AttentionOutput:
    """Attention of this rank's queries over the keys of all ranks. Differentiable once in query, key and value.

    A collective over ``cp_group``, forward and backward: every rank calls it with its own part of the sequence and the
    same everything else. The result is, to rounding, that of :func:`megatron_mtraining.vertical_slash_attention` on the
    whole sequence.

    Args:
        query: ``[batch, local_len, num_heads, head_dim]``, this rank's tokens in the order of ``layout``.
        key: ``[batch, local_len, num_kv_heads, head_dim]``.
        value: as ``key``.
        index: what each query head keeps. A ``VerticalSlashIndex`` has global positions and is the same on every rank;
            a ``BlockListIndex`` holds the lists of this rank's query blocks.
        layout: where each block of the sequence lives.
        cp_group: the context-parallel group: a torch process group, or a rank simulator's.
        inner_group: the ranks of this node; without inner and outer groups the whole ``cp_group`` is one node. The
            ``flat`` schedule uses none of the four groups, except an ``inner_gradient_group`` of all of ``cp_group``.
        outer_group: the ranks that hold this rank's place in every node.
        inner_gradient_group: the members of ``inner_group``, for gradients, which otherwise queue behind the keys.
        outer_gradient_group: the members of ``outer_group``, for gradients.
        schedule: ``hierarchical``, ``flat`` or ``gather``; see :func:`megatron_mtraining.ring.schedule.ring_schedule`.
        softmax_scale: what scores are multiplied with; default ``head_dim ** -0.5``.
        cu_seqlens: int32 ``[documents + 1]``: global bounds of packed documents, for batch 1. On the CPU it costs no
            synchronisation.
        deterministic: gradients that repeat bit for bit, whatever the backend.
        backend: ``auto``, ``reference`` or ``cuda``; a named one never falls back.
        start: of this key and value, in these groups, on every rank or none: their first transfers may be under way.

    Returns:
        This rank's ``out`` in the dtype of ``query`` and ``lse`` in float32 (float64 for float64 input).

    Raises:
        ValueError: inputs, layout and groups do not fit together; nothing has been computed then.
        BackendUnavailableError: the named backend cannot run.
        RankMismatchError: ranks called with different arguments.
    """
    cp = as_transport(cp_group)
    with announcing_refusal(cp, query, key, value):
        ring = {
            "cp_group": cp,
            "schedule": schedule,
            "inner_group": inner_group,
            "outer_group": outer_group,
            "inner_gradient_group": inner_gradient_group,
            "outer_gradient_group": outer_gradient_group,
        }
        if start is None:
            start = RingStart(key, value, **ring)
        else:
            start.check_is_of(key, value, **ring)
        check_kinds(query, index)
        _check_layout(query, index, layout, cp)
        call = check_attention_inputs(
            query,
            key,
            value,
            index,
            seq_len=layout.seq_len,
            softmax_scale=softmax_scale,
            cu_seqlens=cu_seqlens,
            query_blocks=blocks_of(layout, cp.rank),
        )
        plan = RingPlan(
            layout=layout,
            documents=call.documents,
            rings=start.rings,
            schedule=start.schedule,
            backend=resolve_backend(
                backend,
                device=query.device,
                dtype=query.dtype,
                head_dim=query.shape[3],
                block_size=index.block_size,
                deterministic=deterministic,
            ),
            softmax_scale=call.softmax_scale,
        )
    compared = None if isinstance(index, BlockListIndex) else index  # each rank has block lists of its own
    agree_on_plan(_plan_fields(query, key, value, index, plan, start), cp, device=query.device, index=compared)
    return AttentionOutput(*RingAttention.apply(query, key, value, index, plan, start.take()))


def _check_layout(query: Tensor, index: AttentionIndex, layout: SequenceLayout, cp: Transport) -> None:
    check_layout(layout)
    if layout.cp_size != cp.size:
        raise invalid("layout.cp_size", f"the size {cp.size} of cp_group", layout.cp_size)
    if index.block_size != layout.block_size:
        raise invalid("index.block_size", f"the layout's block_size {layout.block_size}", index.block_size)
    if query.dim() == 4 and query.shape[1] != layout.local_len:
        raise invalid(
            "query.shape[1]",
            f"the layout's local_len {layout.local_len}",
            query.shape[1],
            "Give each rank its own part, as shard_sequence cuts it.",
        )


def _plan_fields(
    query: Tensor, key: Tensor, value: Tensor, index: AttentionIndex, plan: RingPlan, start: RingStart
) -> dict[str, object]:
    """The values behind :data:`megatron_mtraining.transport.agreement.PLAN_FIELDS`."""
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return {
        "operation": "ring_attention",
        "query.shape": tuple(query.shape),
        "key.shape": tuple(key.shape),
        "query.dtype": query.dtype,
        "requires_grad": differentiable,
        "start": "posted" if start.is_posted else "not posted",
        "layout": plan.layout,
        "schedule": plan.schedule.kind,
        "inner group size": plan.schedule.inner_size,
        "backend": plan.backend.name,
        "softmax_scale": plan.softmax_scale,
        "index widths": _index_widths(index),
        "cu_seqlens": None if plan.documents is None else plan.documents.bounds,
    }


def _index_widths(index: AttentionIndex) -> tuple[object, ...]:
    """What ranks must have in common of their indices, as far as the host knows it."""
    if isinstance(index, BlockListIndex):
        return index.rows, index.num_lists, "block lists", index.chunk_blocks, index.row_masks is not None
    return index.rows, index.num_lists, index.vertical.shape[2], index.slash.shape[2]
