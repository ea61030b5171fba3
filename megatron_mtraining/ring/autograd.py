"""Ring attention forward and backward on one rank, as one autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..types import AttentionIndex, AttentionOutput, BlockListIndex
from .circulate import RingSum, inner_sum, ring_rounds
from .plan import RingPlan


class RingAttention(torch.autograd.Function):
    """Local queries against the keys of all ranks; gradients of local keys from the queries of all ranks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, index: AttentionIndex, plan: RingPlan
    ) -> tuple[Tensor, Tensor]:
        """``out`` as ``query`` and ``lse`` ``[batch, num_heads, local_len]`` in the accumulate dtype."""
        packed = _gather_vertical(key, value, index, plan)
        out, lse = ring_forward(query, key, value, packed, index, plan)
        ctx.save_for_backward(query, key, value, packed, out, lse, *index.tensors)
        ctx.plan, ctx.rebuild_index = plan, index.rebuild
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value, in their dtypes. Every rank of the group must run it."""
        query, key, value, packed, out, lse, *lists = ctx.saved_tensors
        index = ctx.rebuild_index(*lists)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        delta = ctx.plan.backend.softmax_delta(grad_out, out, grad_lse)
        return *ring_backward(grad_out, query, key, value, packed, lse, delta, index, ctx.plan), None, None


def ring_forward(
    query: Tensor, key: Tensor, value: Tensor, packed: Tensor | None, index: AttentionIndex, plan: RingPlan
) -> AttentionOutput:
    """All verticals and the slashes to the first keys in the first step, then the slashes of each further ring step.

    Block lists have no verticals: each step takes the pairs that they keep among the keys in hand.

    Args:
        query: ``[batch, local_len, num_heads, head_dim]``.
        key: ``[batch, local_len, num_kv_heads, head_dim]``.
        value: as ``key``.
        packed: ``[2, rows, num_lists, max_v, head_dim]``: selected rows of key and of value, of all ranks; None for an
            index that has no verticals.
        index: the global index, or this rank's block lists.
        plan: what this rank does.

    Returns:
        ``out`` in the dtype of ``query`` and ``lse`` in the accumulate dtype.
    """
    backend, scale = plan.backend, plan.softmax_scale
    result = None
    for ring_round, steps in ring_rounds(key, value, plan.schedule, plan.rings):
        for step, held_key, held_value in steps:
            given, geometry = (query, held_key, held_value), plan.geometry(step.source_ranks)
            options = {"softmax_scale": scale, "is_last": ring_round.is_last(step)}
            if result is None and packed is not None:  # verticals come along: their packs hold the rows of all ranks
                result = backend.forward(*given, packed, index, geometry, **options)
            else:
                result = backend.slash_forward(*given, index, geometry, previous=result, **options)
            del given, held_key, held_value  # makes room for the keys that arrive next
    return result


def ring_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    index: AttentionIndex,
    plan: RingPlan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtypes; keys circulate again, their gradients go home.

    Args:
        grad_out: as ``out``.
        query: as in :func:`ring_forward`, and so key, value, packed, index and plan.
        key: see ``query``.
        value: see ``query``.
        packed: see ``query``.
        lse: ``[batch, num_heads, local_len]``, of the whole softmax.
        delta: ``[batch, num_heads, local_len]``: ``sum(grad_out * out, -1) - grad_lse``.
        index: see ``query``.
        plan: see ``query``.
    """
    backend, scale, schedule, rings = plan.backend, plan.softmax_scale, plan.schedule, plan.rings
    grad_query = grad_packed = None
    outer_sum = RingSum(rings.outer_gradient)
    for ring_round, steps in ring_rounds(key, value, schedule, rings):
        node_sum = inner_sum(schedule, rings)
        for step, held_key, held_value in steps:
            given, geometry = (grad_out, query, held_key, held_value), plan.geometry(step.source_ranks)
            options = {"softmax_scale": scale, "is_last": ring_round.is_last(step)}
            if grad_query is None and packed is not None:
                grad_query, grad_keys, own_share = backend.backward(
                    *given, packed, lse, delta, index, geometry, **options
                )
                grad_packed = rings.cp.all_reduce(own_share)
            else:
                grad_query, grad_keys = backend.slash_backward(
                    *given, lse, delta, index, geometry, previous=grad_query, **options
                )
            node_sum.add(grad_keys)
            del given, held_key, held_value, grad_keys
        outer_sum.add(node_sum.total())
    if grad_packed is None:
        return grad_query, *outer_sum.total().to(query.dtype)
    grad_key, grad_value = backend.unpack_vertical_grad(
        grad_packed, index, plan.own_geometry, grad_keys=outer_sum.total(), dtype=query.dtype
    )
    return grad_query, grad_key, grad_value


def _gather_vertical(key: Tensor, value: Tensor, index: AttentionIndex, plan: RingPlan) -> Tensor | None:
    """``[2, rows, num_lists, max_v, head_dim]``: the selected rows of all ranks, by one collective."""
    if isinstance(index, BlockListIndex):
        return None
    return plan.rings.cp.assemble(plan.backend.pack_vertical(key, value, index, plan.own_geometry))
