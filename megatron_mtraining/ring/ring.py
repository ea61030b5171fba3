"""Forward and backward of ring attention on one rank, as one autograd function.

Algorithm 2 of the MTraining paper: KV blocks rotate inside a node and, more slowly, between nodes, while the local
queries attend to the current block. In the backward pass the blocks rotate again, and their gradients follow them to
the ranks that own the keys. One device is a ring of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..backends.geometry import BlockGeometry
from ..backends.protocol import AttentionBackend
from ..backends.resolve import resolve_backend
from ..layout import SequenceLayout, blocks_of
from ..request import AttentionRequest
from ..tensors import cached_tensors
from ..transport import Pending, RingTransports, Transport
from ..transport.base import Received
from ..types import AttentionIndex, AttentionOutput, Documents
from .schedule import RingSchedule, RingStep, ring_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RingContext:
    """Everything of one call that is not a tensor; forward and backward share it."""

    layout: SequenceLayout
    """Global block of each local block, for every rank."""

    documents: Documents | None
    """Packed documents, or None when each batch row is one document."""

    groups: RingTransports
    """Groups of the ring."""

    schedule: RingSchedule
    """Steps of this rank."""

    backend: AttentionBackend
    """Kernels of a step."""

    softmax_scale: float
    """Factor of the scores."""

    _geometries: dict[tuple[int, ...], BlockGeometry] = field(init=False, repr=False, compare=False)
    """Geometries of earlier calls on such a sequence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_geometries", _geometries_of(self.layout, self.documents, self.groups.cp.rank))

    @classmethod
    def of(cls, request: AttentionRequest) -> RingContext:
        """Return the context of a call, with the schedule and the backend that its configuration names."""
        query, config, groups = request.query, request.config, request.groups
        schedule = "flat" if config.schedule == "auto" else config.schedule  # auto on one rank: nothing to decide
        sizes = {"cp_rank": groups.cp.rank, "cp_size": groups.cp.size, "inner_size": groups.inner.size}
        return cls(
            layout=request.layout,
            documents=request.documents,
            groups=groups,
            schedule=ring_schedule(schedule, **sizes),
            backend=resolve_backend(
                config.backend,
                device=query.device,
                dtype=query.dtype,
                head_dim=query.shape[3],
                block_size=config.block_size,
            ),
            softmax_scale=request.softmax_scale,
        )

    def geometry(self, source_ranks: tuple[int, ...]) -> BlockGeometry:
        """Return the geometry of the local queries against the KV block of ``source_ranks``.

        The same object for every layer and step: backends cache tables by its identity.
        """
        if source_ranks not in self._geometries:
            self._geometries[source_ranks] = BlockGeometry(
                seq_len=self.layout.seq_len,
                block_size=self.layout.block_size,
                query_blocks=blocks_of(self.layout, self.groups.cp.rank),
                key_blocks=blocks_of(self.layout, *source_ranks),
                documents=self.documents,
            )
        return self._geometries[source_ranks]

    @property
    def own_geometry(self) -> BlockGeometry:
        """Geometry of the local queries against the local keys."""
        return self.geometry((self.groups.cp.rank,))


@cached_tensors(maxsize=16)
def _geometries_of(
    layout: SequenceLayout, documents: Documents | None, cp_rank: int
) -> dict[tuple[int, ...], BlockGeometry]:
    """One rank's geometries for such a sequence; packed documents differ in every batch."""
    return {}


@dataclass(slots=True)
class PostedKV:
    """This rank's keys and values, with the transfers of the first step posted."""

    block: Tensor | tuple[Tensor, Tensor] | None
    """``[2, batch, local_len, num_kv_heads, head_dim]``, or key and value apart where the block is not rotated."""

    outer: Pending | None
    """Transfer to the next node."""

    inner: Pending | tuple[Pending, Pending] | None
    """Transfer to the next rank of the node, or the all-gathers of key and of value."""

    def take(self) -> tuple[Any, Pending | None, Any]:
        """Return all three once; this object, which a caller may keep, then holds no memory."""
        taken = self.block, self.outer, self.inner
        self.block = self.outer = self.inner = None
        return taken


def post_kv(key: Tensor, value: Tensor, schedule: RingSchedule, groups: RingTransports) -> PostedKV:
    """Post the first transfers of this rank's keys and values. They depend on no index."""
    block = torch.stack((key, value)) if schedule.rotates else (key, value)
    return PostedKV(block, *_post(block, None, schedule.steps[0], schedule, groups))


def _post(
    block: Any, outer: Pending | None, step: RingStep, schedule: RingSchedule, groups: RingTransports
) -> tuple[Pending | None, Any]:
    """Post the transfers of ``step``; ``outer`` is the one that an earlier step of this node has posted."""
    if step.sends_outer:
        outer = groups.outer.exchange(block)
    if schedule.gathers:
        return outer, tuple(groups.inner.post_all_gather(tensor) for tensor in block)
    return outer, groups.inner.exchange(block) if step.sends_inner else None


def rotate_kv(
    posted: PostedKV, steps: Sequence[RingStep], schedule: RingSchedule, groups: RingTransports
) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
    """Yield each of ``steps`` with its key and value blocks, whose own transfers are posted by then.

    Two KV blocks exist at a time, the current one and the arriving one, if the caller drops a step's before it asks for
    the next. While a node's keys travel to the next node there are up to two more: the one sent, the one that arrives.
    While other nodes' steps interrupt those on the own node there is one more, held for the next of these.
    """
    block, outer, inner = posted.take()
    held = None
    for step in steps:
        if step.arrives_from == "inner":
            block = inner.wait()
        elif step.arrives_from == "outer":
            held = inner.wait() if inner is not None else held
            block, outer = outer.wait(), None
        elif step.arrives_from == "held":
            block, held = held, None
        if step.arrives_from != "self":
            outer, inner = _post(block, outer, step, schedule, groups)
        if schedule.gathers:
            block, inner = [_end_to_end(gather.wait()) for gather in inner], None
        yield step, *(block.unbind() if isinstance(block, Tensor) else block)
        block = None


def _end_to_end(gathered: Tensor) -> Tensor:
    """``[size, batch, local_len, ...]`` to ``[batch, size * local_len, ...]``; a view where batch is 1."""
    return torch.flatten(gathered.movedim(0, 1), 1, 2)


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make a derivative of the results of an autograd function's ``backward`` raise.

    ``backward`` takes ``ctx.saved_tensors`` behind ``ctx``: under torch's checkpoints they can be read only once.

    ``torch.autograd.function.once_differentiable`` cuts its results off from the inputs: ``backward`` raises there, and
    ``torch.autograd.grad`` silently leaves their share out.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            results = backward(ctx, saved, *gradients)
        if not torch.is_grad_enabled():
            return results
        given = [each for each in (*gradients, *saved) if each is not None and each.requires_grad]
        return tuple(None if each is None else _WithoutDerivative.apply(each, *given) for each in results)

    return run


class _WithoutDerivative(torch.autograd.Function):
    """A gradient, in the graph of all tensors that it was computed from."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *given: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "Sparse attention must be differentiated once, got a derivative of its gradients. "
            "Do without it, or use dense attention in PyTorch there."
        )


class RingAttention(torch.autograd.Function):
    """Attention of the local queries over the keys of all ranks, and the gradients of local queries, keys, values."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: RingContext,
        posted: PostedKV,
        rebuild_index: Callable[..., AttentionIndex],
        *lists: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``out`` as ``query`` and ``lse`` ``[batch, num_heads, local_len]`` in the accumulate dtype."""
        index = rebuild_index(*lists)
        packed = pack_columns(key, value, index, context)
        out, lse = ring_forward(query, posted, packed, index, context)
        # One device packs again in its backward, where the rows are at hand, and saves no pack.
        saved = packed if context.groups.cp.size > 1 else None
        ctx.save_for_backward(query, key, value, saved, out, lse, *lists)
        ctx.context, ctx.rebuild_index = context, rebuild_index
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor | None, ...], grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value, in their dtypes. A collective: every rank must run it."""
        query, key, value, packed, out, lse, *lists = saved
        context, none = ctx.context, (None,) * (3 + len(lists))
        if grad_out is None and grad_lse is None and context.groups.cp.size == 1:
            return None, None, None, *none
        index = ctx.rebuild_index(*lists)
        if packed is None:
            packed = pack_columns(key, value, index, context)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        delta = context.backend.softmax_delta(grad_out, out, grad_lse)
        return *ring_backward(grad_out, query, key, value, packed, lse, delta, index, context), *none


def pack_columns(key: Tensor, value: Tensor, index: AttentionIndex, context: RingContext) -> Tensor | None:
    """Gather the selected columns of all ranks, ``[2, rows, num_lists, max_v, head_dim]``; None without columns."""
    packed = context.backend.pack(key, value, index, context.own_geometry)
    return None if packed is None else context.groups.cp.assemble(packed)


def ring_forward(
    query: Tensor, posted: PostedKV, packed: Tensor | None, index: AttentionIndex, context: RingContext
) -> AttentionOutput:
    """Attend to all selected columns in the first step, and to the current KV block in every step.

    Args:
        query: ``[batch, local_len, num_heads, head_dim]``.
        posted: this rank's keys and values.
        packed: ``[2, rows, num_lists, max_v, head_dim]``: selected columns of all ranks; None without columns.
        index: the global index, or this rank's block lists.
        context: everything else of the call.

    Returns:
        ``out`` in the dtype of ``query`` and ``lse`` in the accumulate dtype.
    """
    result = None
    for step, key, value in rotate_kv(posted, context.schedule.steps, context.schedule, context.groups):
        result = context.backend.forward(
            query,
            key,
            value,
            index,
            context.geometry(step.source_ranks),
            softmax_scale=context.softmax_scale,
            packed=packed if result is None else None,
            previous=result,
            is_last=step.is_last,
        )
        del key, value  # frees memory for the block that arrives next
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
    context: RingContext,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, in their dtypes.

    A step's dK and dV leave as soon as they are computed, if another rank waits for them; dQ is computed meanwhile.
    The other arguments are those of :func:`ring_forward`.

    Args:
        grad_out: as ``out``.
        key: ``[batch, local_len, num_kv_heads, head_dim]``.
        value: as ``key``.
        lse: ``[batch, num_heads, local_len]``, of the whole softmax.
        delta: ``[batch, num_heads, local_len]``: ``sum(grad_out * out, -1) - grad_lse``.
    """
    backend, groups, schedule = context.backend, context.groups, context.schedule
    grad_query = packed_sum = None
    reduction = GradientReduction(schedule, groups)

    def reduce(grad_kv: Tensor, grad_packed: Tensor | None, step: RingStep) -> None:
        nonlocal packed_sum
        reduction.add(grad_kv, step)
        if grad_packed is not None:
            packed_sum = groups.cp.post_all_reduce(grad_packed)

    posted, steps = post_kv(key, value, schedule, groups), schedule.backward_steps
    for step, key_block, value_block in rotate_kv(posted, steps, schedule, groups):
        reduction.begin(step)
        early = reduction.sends(step)
        grad_query, *grads = backend.backward(
            grad_out,
            query,
            key_block,
            value_block,
            lse,
            delta,
            index,
            context.geometry(step.source_ranks),
            softmax_scale=context.softmax_scale,
            packed=packed if grad_query is None else None,
            previous=grad_query,
            is_last=step.is_last,
            on_kv_gradients=(lambda *grads, step=step: reduce(*grads, step)) if early else None,
        )
        if not early:
            reduce(*grads, step)
        del key_block, value_block, grads
        reduction.end(step)
    grad_kv = reduction.total()
    if packed_sum is None:
        return grad_query, *grad_kv.to(query.dtype)
    grad_key, grad_value = backend.unpack(
        packed_sum.wait(), index, context.own_geometry, grad_kv=grad_kv, dtype=query.dtype
    )
    return grad_query, grad_key, grad_value


class RingReduction:
    """Sums that travel around a ring behind the KV blocks.

    The contribution to this rank's own keys stays. Every other one joins the sum that arrives from rank - 1 and
    travels on; after ``size - 1`` hops each sum is at the owner of its keys.
    """

    def __init__(self, ring: Transport) -> None:
        self._ring = ring
        self._own: Tensor | None = None
        self._arriving: Pending | None = None

    def set_own(self, contribution: Tensor) -> None:
        """Take the contribution to this rank's own keys; the caller does not use it afterwards."""
        self._own = contribution

    def add(self, contribution: Tensor) -> None:
        """Take the contribution to another rank's keys: in the k-th call those of rank - k."""
        if self._arriving is not None:
            contribution = self._arriving.wait().add_(contribution)
        self._arriving = self._ring.exchange(contribution)

    def settle(self) -> None:
        """Wait for the sum that arrives, so that the one sent takes no memory while nothing is added."""
        if self._arriving is not None:
            self._arriving = Received(self._arriving.wait())

    def total(self) -> Tensor:
        """Return the sum for this rank's own keys, once, after the last contribution."""
        if self._arriving is not None:
            self._own.add_(self._arriving.wait())
        return self._own


class NodeReduceScatter:
    """The sum for ``gather``: one contribution holds those to the keys of all ranks of the node, end to end."""

    def __init__(self, group: Transport) -> None:
        self._group = group
        self._arriving: Pending | None = None

    def add(self, contribution: Tensor) -> None:
        """Take ``[2, batch, size * local_len, num_kv_heads, head_dim]``."""
        parts = contribution.unflatten(2, (self._group.size, -1))
        self._arriving = self._group.post_reduce_scatter(parts.movedim(2, 0).contiguous())

    def total(self) -> Tensor:
        """Return the sum for this rank's own keys."""
        return self._arriving.wait()


class GradientReduction:
    """The two levels of the reduction: inside a node behind every step, between nodes behind a node's last step."""

    def __init__(self, schedule: RingSchedule, groups: RingTransports) -> None:
        self._gathers, self._group = schedule.gathers, groups.inner_gradient
        self._between_nodes = RingReduction(groups.outer_gradient)
        self._own_node, self._node = self._new_node(), None
        self._other_nodes = groups.outer_gradient.size - 1  # whose sums have not left yet

    def begin(self, step: RingStep) -> None:
        """Prepare for the contribution of ``step``."""
        if step.arrives_from == "outer":
            if not self._gathers:
                self._own_node.settle()
            self._node = self._new_node()
        elif step.arrives_from in ("self", "held"):
            self._node = self._own_node

    def sends(self, step: RingStep) -> bool:
        """True if the contribution of ``step`` goes to another rank at once."""
        return self._joins_sum(step) or self._leaves_node(step)

    def add(self, contribution: Tensor, step: RingStep) -> None:
        """Take the contribution of ``step``; the last node's sum, and one that waits for nobody, leaves at once."""
        if self._joins_sum(step):
            self._node.add(contribution)
        else:
            self._node.set_own(contribution)
        if self._leaves_node(step):
            self.end(step)

    def end(self, step: RingStep) -> None:
        """Hand a node's sum on, after the last step on its keys."""
        if not step.ends_node or self._node is None:
            return
        if self._node is self._own_node:
            self._between_nodes.set_own(self._node.total())
        else:
            self._between_nodes.add(self._node.total())
            self._other_nodes -= 1
        self._node = None

    def total(self) -> Tensor:
        """Return the sum of all ranks' contributions to this rank's own keys, once, after the last step."""
        return self._between_nodes.total()

    def _joins_sum(self, step: RingStep) -> bool:
        return self._gathers or step.arrives_from in ("inner", "held")

    def _leaves_node(self, step: RingStep) -> bool:
        is_due = self._other_nodes == 1 or self._group.size == 1
        return is_due and step.ends_node and self._node is not self._own_node

    def _new_node(self) -> RingReduction | NodeReduceScatter:
        return NodeReduceScatter(self._group) if self._gathers else RingReduction(self._group)
