"""Ring attention forward and backward on one rank, as one autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..ops.gradients import zero_accumulators
from ..types import AttentionOutput, VerticalSlashIndex
from .circulate import RingSum, inner_steps, inner_sum, outer_rounds
from .plan import RingPlan


class RingAttention(torch.autograd.Function):
    """Local queries against the keys of all ranks; gradients of local keys from the queries of all ranks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, index: VerticalSlashIndex, plan: RingPlan
    ) -> tuple[Tensor, Tensor]:
        """``out`` as ``query`` and ``lse`` ``[batch, num_heads, local_len]`` in the accumulate dtype."""
        packed = _gather_vertical(key, value, index, plan)
        out, lse = ring_forward(query, key, value, packed, index, plan)
        out = out.to(query.dtype)
        ctx.save_for_backward(
            query, key, value, packed, out, lse, index.vertical, index.num_vertical, index.slash, index.num_slash
        )
        ctx.plan, ctx.block_size = plan, index.block_size
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value, in their dtypes. Every rank of the group must run it."""
        query, key, value, packed, out, lse, *tables = ctx.saved_tensors
        index = VerticalSlashIndex(*tables, block_size=ctx.block_size)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        delta = ctx.plan.backend.softmax_delta(grad_out, out, grad_lse)
        grads = ring_backward(grad_out, query, key, value, packed, lse, delta, index, ctx.plan)
        return *(grad.to(query.dtype) for grad in grads), None, None


def ring_forward(
    query: Tensor, key: Tensor, value: Tensor, packed: Tensor, index: VerticalSlashIndex, plan: RingPlan
) -> AttentionOutput:
    """The vertical pass, then one slash pass in each ring step, each resumed from the one before.

    Args:
        query: ``[batch, local_len, num_heads, head_dim]``.
        key: ``[batch, local_len, num_kv_heads, head_dim]``.
        value: as ``key``.
        packed: ``[2, rows, num_heads, max_v, head_dim]``: selected rows of key and of value, of all ranks.
        index: the global index.
        plan: what this rank does.

    Returns:
        ``out`` and ``lse`` in the accumulate dtype.
    """
    backend, scale = plan.backend, plan.softmax_scale
    result = None
    for ring_round, node_key, node_value in outer_rounds(key, value, plan.schedule, plan.rings):
        for step, held_key, held_value in inner_steps(ring_round, node_key, node_value, plan.schedule, plan.rings):
            if result is None:  # not before the loop: the first transfers are under way by now
                result = backend.vertical_forward(
                    query, *packed, index, plan.own_geometry, softmax_scale=scale, previous=None
                )
            geometry = plan.geometry(step.source_ranks)
            result = backend.slash_forward(
                query, held_key, held_value, index, geometry, softmax_scale=scale, previous=result
            )
    return result


def ring_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    lse: Tensor,
    delta: Tensor,
    index: VerticalSlashIndex,
    plan: RingPlan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in the accumulate dtype; keys circulate again, their gradients go home.

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
    (grad_query,) = zero_accumulators(query)
    grad_packed = None
    outer_sum = RingSum(rings.outer_gradient)
    for ring_round, node_key, node_value in outer_rounds(key, value, schedule, rings):
        node_sum = inner_sum(schedule, rings)
        for step, held_key, held_value in inner_steps(ring_round, node_key, node_value, schedule, rings):
            if grad_packed is None:  # not before the loop: the first transfers are under way by now
                grad_packed = _vertical_backward(grad_out, query, packed, lse, delta, index, plan, grad_query)
            contribution = grad_query.new_zeros(2, *held_key.shape)
            backend.slash_backward(
                grad_out,
                query,
                held_key,
                held_value,
                lse,
                delta,
                index,
                plan.geometry(step.source_ranks),
                softmax_scale=scale,
                grad_query=grad_query,
                grad_key=contribution[0],
                grad_value=contribution[1],
            )
            node_sum.add(contribution)
        outer_sum.add(node_sum.total())
    grad_key, grad_value = outer_sum.total()
    backend.unpack_vertical_grad(*grad_packed, index, plan.own_geometry, grad_key=grad_key, grad_value=grad_value)
    return grad_query, grad_key, grad_value


def _gather_vertical(key: Tensor, value: Tensor, index: VerticalSlashIndex, plan: RingPlan) -> Tensor:
    """``[2, rows, num_heads, max_v, head_dim]``: the selected rows of all ranks, by one collective."""
    return plan.rings.cp.assemble(torch.stack(plan.backend.pack_vertical(key, value, index, plan.own_geometry)))


def _vertical_backward(
    grad_out: Tensor,
    query: Tensor,
    packed: Tensor,
    lse: Tensor,
    delta: Tensor,
    index: VerticalSlashIndex,
    plan: RingPlan,
    grad_query: Tensor,
) -> Tensor:
    """Adds to ``grad_query``; returns the gradients of the packed rows, summed over all ranks by one collective."""
    (grad_packed,) = zero_accumulators(packed)
    plan.backend.vertical_backward(
        grad_out,
        query,
        *packed,
        lse,
        delta,
        index,
        plan.own_geometry,
        softmax_scale=plan.softmax_scale,
        grad_query=grad_query,
        grad_packed_key=grad_packed[0],
        grad_packed_value=grad_packed[1],
    )
    return plan.rings.cp.all_reduce(grad_packed)
