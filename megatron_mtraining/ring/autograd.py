"""Ring attention forward and backward on one rank, as one autograd function."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..backends.gradients import differentiable_once
from ..types import AttentionIndex, AttentionOutput, BlockListIndex
from .circulate import Departure, HomewardSums, depart, ring_rounds
from .plan import RingPlan


class RingAttention(torch.autograd.Function):
    """Local queries against the keys of all ranks; gradients of local keys from the queries of all ranks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: AttentionIndex,
        plan: RingPlan,
        departure: Departure | None,
    ) -> tuple[Tensor, Tensor]:
        """``out`` as ``query`` and ``lse`` ``[batch, num_heads, local_len]`` in the accumulate dtype."""
        if departure is None:
            departure = depart(key, value, plan.schedule, plan.rings)
        packed = _gather_vertical(key, value, index, plan)
        out, lse = ring_forward(query, departure, packed, index, plan)
        ctx.save_for_backward(query, key, value, packed, out, lse, *index.tensors)
        ctx.plan, ctx.rebuild_index = plan, index.rebuild
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor | None, ...], grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value, in their dtypes. Every rank of the group must run it."""
        query, key, value, packed, out, lse, *lists = saved
        index = ctx.rebuild_index(*lists)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        delta = ctx.plan.backend.softmax_delta(grad_out, out, grad_lse)
        return *ring_backward(grad_out, query, key, value, packed, lse, delta, index, ctx.plan), None, None, None


def ring_forward(
    query: Tensor, departure: Departure, packed: Tensor | None, index: AttentionIndex, plan: RingPlan
) -> AttentionOutput:
    """All verticals and the slashes to the first keys in the first step, then the slashes of each further ring step.

    Block lists have no verticals: each step takes the pairs that they keep among the keys in hand.

    Args:
        query: ``[batch, local_len, num_heads, head_dim]``.
        departure: of this rank's key and value.
        packed: ``[2, rows, num_lists, max_v, head_dim]``: selected rows of key and of value, of all ranks; None for an
            index that has no verticals.
        index: the global index, or this rank's block lists.
        plan: what this rank does.

    Returns:
        ``out`` in the dtype of ``query`` and ``lse`` in the accumulate dtype.
    """
    backend, scale = plan.backend, plan.softmax_scale
    result = None
    for ring_round, steps in ring_rounds(departure, plan.schedule, plan.rings):
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

    Gradients that another rank waits for leave as soon as they are made; that of ``query`` is made meanwhile.

    Args:
        grad_out: as ``out``.
        query: as in :func:`ring_forward`, and so packed, index and plan.
        key: ``[batch, local_len, num_kv_heads, head_dim]``.
        value: as ``key``.
        packed: see ``query``.
        lse: ``[batch, num_heads, local_len]``, of the whole softmax.
        delta: ``[batch, num_heads, local_len]``: ``sum(grad_out * out, -1) - grad_lse``.
        index: see ``query``.
        plan: see ``query``.
    """
    backend, scale, schedule, rings = plan.backend, plan.softmax_scale, plan.schedule, plan.rings
    grad_query = grad_packed = None
    sums = HomewardSums(schedule, rings)

    def send(grad_keys: Tensor, own_share: Tensor | None = None, *, is_last: bool) -> None:
        nonlocal grad_packed
        sums.add(grad_keys, is_last=is_last)
        if own_share is not None:
            grad_packed = rings.cp.post_all_reduce(own_share)

    for ring_round, steps in ring_rounds(depart(key, value, schedule, rings), schedule, rings):
        sums.begin_round()
        for step, held_key, held_value in steps:
            given, geometry = (grad_out, query, held_key, held_value), plan.geometry(step.source_ranks)
            options = {"softmax_scale": scale, "is_last": ring_round.is_last(step)}
            send_this = partial(send, is_last=options["is_last"])
            at_once = send_this if sums.sends(is_last=options["is_last"]) else None
            if grad_query is None and packed is not None:
                grad_query, *grads = backend.backward(
                    *given, packed, lse, delta, index, geometry, on_key_gradients=at_once, **options
                )
            else:
                grad_query, *grads = backend.slash_backward(
                    *given, lse, delta, index, geometry, previous=grad_query, on_key_gradients=at_once, **options
                )
            if at_once is None:
                send_this(*grads)
            del given, held_key, held_value, grads
        sums.end_round()
    grad_keys = sums.total()
    if grad_packed is None:
        return grad_query, *grad_keys.to(query.dtype)
    grad_key, grad_value = backend.unpack_vertical_grad(
        grad_packed.wait(), index, plan.own_geometry, grad_keys=grad_keys, dtype=query.dtype
    )
    return grad_query, grad_key, grad_value


def _gather_vertical(key: Tensor, value: Tensor, index: AttentionIndex, plan: RingPlan) -> Tensor | None:
    """``[2, rows, num_lists, max_v, head_dim]``: the selected rows of all ranks, by one collective."""
    if isinstance(index, BlockListIndex):
        return None
    return plan.rings.cp.assemble(plan.backend.pack_vertical(key, value, index, plan.own_geometry))
