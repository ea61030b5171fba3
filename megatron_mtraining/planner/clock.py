"""Completion time of a ring attention call: the ring's own autograd function, on transports that only take time.

One process has the time of every rank, since all ranks make the same calls in the same order: ``[cp_size]`` seconds.
Tensors have one element for each rank whose rows they hold; transports multiply by the elements that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..metrics import RingWork, backward_flops, forward_flops
from ..ring import RingAttention, RingShape, post_kv
from ..transport import RingTransports, inner_and_outer_ranks
from ..types import AttentionOutput
from .profile import Profile

_QUERY_SHARE = 3 / 7
"""Share of dQ in a backward step: three of the seven products; dK and dV have four. Dense kernels use one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """Shape of one layer's attention call."""

    seq_len: int
    num_heads: int  # query heads of a rank, after tensor parallelism
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    num_lists: int | None = None  # of the index; None: one for each query head


class Direction(NamedTuple):
    """Forward or backward of one layer's attention call."""

    gpu_ms: float  # until the last rank is done, where everything was launched ahead
    host_ms: float  # of launching on a host; 0 for dense kernels, whose hosts were not measured
    compute_ms: float  # of the mean rank
    inner_bytes: int  # sent by the busiest rank inside its node
    outer_bytes: int  # and out of its node

    @property
    def ms(self) -> float:
        """The slower of GPU and host, since kernels are launched ahead."""
        return max(self.gpu_ms, self.host_ms)

    @property
    def exposed_ms(self) -> float:
        """Waiting of the GPU for keys, for gathered rows and for busier ranks."""
        return self.gpu_ms - self.compute_ms


class Prediction(NamedTuple):
    """Both directions."""

    forward: Direction
    backward: Direction


def predict(
    work: RingWork, ring: RingShape, sizes: CallSizes, profile: Profile, *, pack_width: int, is_dense: bool = False
) -> Prediction:
    """Predict times of one layer's attention, without packing and selection.

    ``work`` is of all heads under the schedule ``ring``; ``pack_width`` vertical rows of each list are gathered once.
    Kernels that are ``is_dense`` take all gradients in one pass.
    """
    clock = RingClock(ring, profile, query_share=0.0 if is_dense else _QUERY_SHARE)
    query, key, value = (torch.zeros(1, 1, 1, 1, dtype=sizes.dtype, requires_grad=True) for _ in range(3))
    context = SimpleNamespace(
        schedule=ring.schedule,
        groups=clock.groups(sizes, pack_width=pack_width),
        backend=ClockKernels(clock),
        softmax_scale=1.0,
        own_geometry=None,
        geometry=lambda source_ranks: None,
    )
    results: list[Direction] = []
    for name in ("forward", "backward"):
        seconds = step_seconds(name, work, profile, ring=ring, head_dim=sizes.head_dim, is_dense=is_dense)
        clock.start(seconds)
        with torch.enable_grad():
            if name == "forward":
                posted = post_kv(key.detach(), value.detach(), context.schedule, context.groups)
                out, _ = RingAttention.apply(query, key, value, context, posted, object)
            else:
                torch.autograd.grad(out.sum(), (query, key, value))
        assert not clock.steps, "the ring took fewer steps than were counted"
        inner, outer = clock.sent.amax(1).round().long().tolist()
        once_us, step_us = (getattr(profile, f"host_{name}{part}_us") for part in ("", "_step"))
        host_ms = 0.0 if is_dense else 1e-3 * (once_us + ring.num_steps * step_us)
        gpu_ms, compute_ms = 1e3 * float(clock.now.max()), 1e3 * float(seconds.sum(1).mean())
        results.append(Direction(gpu_ms, host_ms, compute_ms, inner, outer))
    return Prediction(*results)


def step_seconds(
    direction: str, work: RingWork, profile: Profile, *, ring: RingShape, head_dim: int, is_dense: bool = False
) -> Tensor:
    """Return float64 ``[cp_size, steps]``: computing of each rank in each step of a ``forward`` or ``backward``."""
    flops = forward_flops if direction == "forward" else backward_flops
    kinds = ("dense", "dense") if is_dense else ("slash", "vertical")
    rates = [1e12 * getattr(profile, f"{kind}_{direction}_tflops") for kind in kinds]
    slash, vertical = (flops(pairs.double(), head_dim=head_dim) for pairs in (work.slash, work.vertical))
    seconds = slash / rates[0] + 1e-6 * getattr(profile, f"gpu_{direction}_step_us")
    seconds[:, 0] += vertical / rates[1]
    return seconds if direction == "forward" else seconds[:, list(ring.schedule.backward_order)]


class RingClock:
    """The time of every rank, and of its link inside its node (level 0) and out of it (level 1).

    A link carries one message after the other. A transfer starts when both ends have posted it. A collective starts
    when all its ranks have posted it; its bytes follow those of earlier collectives, of which gradients have groups of
    their own. It does not wait for other messages in flight but delays later ones.
    """

    now: Tensor  # [cp_size], seconds of each rank
    steps: list[Tensor]  # seconds of the steps to come, each [cp_size]

    def __init__(self, ring: RingShape, profile: Profile, *, query_share: float) -> None:
        self.ring, self.query_share = ring, query_share
        self.in_node = min(ring.node_size, ring.cp_size)
        self.node = torch.arange(ring.cp_size) // self.in_node
        rates = torch.tensor([profile.inner_gb_s, profile.outer_gb_s], dtype=torch.float64)
        self.seconds_per_byte = 1e-9 / rates
        self.latency = 1e-6 * torch.tensor([profile.inner_latency_us, profile.outer_latency_us], dtype=torch.float64)

    def start(self, seconds: Tensor) -> None:
        """Begin a direction whose steps take ``seconds``, ``[cp_size, steps]``."""
        self.steps = list(seconds.T)
        self.now = seconds.new_zeros(len(seconds))
        self.free, self.sent, *self.collected = seconds.new_zeros(4, 2, len(seconds)).unbind()

    def groups(self, sizes: CallSizes, *, pack_width: int) -> RingTransports:
        """Return the groups of the ring's schedule for keys, and the group of all ranks for vertical rows."""
        ranks = range(self.ring.cp_size)
        levels = inner_and_outer_ranks(ranks, inner_size=self.ring.schedule.inner_size)
        keys = sizes.seq_len // len(ranks) * sizes.num_kv_heads * sizes.head_dim
        packs = pack_width * (sizes.num_lists or sizes.num_heads) * sizes.head_dim
        transports = {
            f"{name}{suffix}": ClockTransport(self, groups, elements=keys, of_gradients=bool(suffix))
            for suffix in ("", "_gradient")
            for name, groups in zip(("inner", "outer"), levels, strict=True)
        }
        return RingTransports(cp=ClockTransport(self, [ranks], elements=packs), **transports)


class ClockTransport:
    """Ends of all ranks in the groups of one kind: a :class:`megatron_mtraining.transport.Transport`."""

    rank = 0

    def __init__(
        self, clock: RingClock, groups: Sequence[Sequence[int]], *, elements: int, of_gradients: bool = False
    ) -> None:
        self._clock, self._groups = clock, torch.tensor([list(group) for group in groups])
        self.elements, self._of_gradients = elements, of_gradients
        self.global_ranks = tuple(self._groups[0].tolist())
        self.size = len(self.global_ranks)
        self._predecessor, self._successor = (torch.empty_like(clock.node) for _ in range(2))
        self._predecessor[self._groups] = self._groups.roll(1, 1)
        self._successor[self._groups] = self._groups.roll(-1, 1)
        self._level = (clock.node[self._predecessor] != clock.node).long()

    def exchange(self, tensor: Tensor) -> _Posted:
        """Post a transfer, done for a rank when it has received and has been received from."""
        clock, source, level = self._clock, self._predecessor, self._level
        num_bytes = tensor.nbytes * self.elements
        start = torch.maximum(torch.maximum(clock.now, clock.now[source]), clock.free[level, source])
        done = start + clock.latency[level] + num_bytes * clock.seconds_per_byte[level]
        clock.free[level, source] = done
        clock.sent[level, source] += num_bytes
        return _Posted(clock, tensor, torch.maximum(done, done[self._successor]))

    def assemble(self, tensor: Tensor) -> Tensor:
        """Take as long as a sum."""
        return self.post_all_reduce(tensor).wait()

    def post_all_reduce(self, tensor: Tensor) -> _Posted:
        """Post a reduction inside nodes, then of each piece between nodes, then a gather inside."""
        clock, num_bytes = self._clock, tensor.nbytes * self.elements if self.size > 1 else 0
        if not num_bytes:
            return _Posted(clock, tensor, clock.now)
        in_node, nodes = clock.in_node, self.size // clock.in_node
        done = clock.now.amax().expand_as(clock.now)
        if in_node > 1:
            done = self._collect(done, 2 * num_bytes * (in_node - 1) / in_node, level=0, phases=2)
        if nodes > 1:
            done = self._collect(done, 2 * num_bytes / in_node * (nodes - 1) / nodes, level=1, phases=2)
        return _Posted(clock, tensor, done)

    def post_all_gather(self, tensor: Tensor) -> _Posted:
        """Post a gather over the ranks of a node."""
        return self._in_node(tensor.new_zeros(self.size, *tensor.shape), tensor.nbytes)

    def post_reduce_scatter(self, tensor: Tensor) -> _Posted:
        """Post a reduce-scatter over the ranks of a node."""
        return self._in_node(tensor[0], tensor[0].nbytes)

    def _in_node(self, received: Tensor, num_bytes: int) -> _Posted:
        came = torch.empty_like(self._clock.now)
        came[self._groups] = self._clock.now[self._groups].amax(1, keepdim=True).expand(-1, self.size)
        num_bytes *= (self.size - 1) * self.elements
        return _Posted(self._clock, received, self._collect(came, num_bytes, level=0, phases=1))

    def _collect(self, came: Tensor, num_bytes: float, *, level: int, phases: int) -> Tensor:
        """Return the time when ranks that have come have sent as much on one level, behind earlier collectives."""
        clock, collected = self._clock, self._clock.collected[self._of_gradients]
        latency, seconds = phases * clock.latency[level], num_bytes * clock.seconds_per_byte[level]
        collected[level] = torch.maximum(came + latency, collected[level]) + seconds
        clock.free[level] = torch.maximum(clock.free[level], came) + latency + seconds
        clock.sent[level] += num_bytes
        return collected[level].clone()


class _Posted(NamedTuple):
    """Transfer that is done at some time."""

    clock: RingClock
    tensor: Tensor
    done: Tensor

    def wait(self) -> Tensor:
        """Move the time of ranks that come early."""
        self.clock.now = torch.maximum(self.clock.now, self.done)
        return self.tensor


class ClockKernels:
    """:class:`megatron_mtraining.backends.protocol.AttentionBackend` whose steps take the clock's seconds."""

    name = "clock"

    def __init__(self, clock: RingClock) -> None:
        self._clock = clock

    def pack(self, key: Tensor, *_: Any) -> Tensor:
        return key.new_zeros(2, *key.shape)

    def unpack(self, *_: Any, grad_kv: Tensor, dtype: torch.dtype) -> Tensor:
        return grad_kv.to(dtype)

    def softmax_delta(self, grad_out: Tensor, *_: Any) -> Tensor:
        return grad_out

    def forward(self, query: Tensor, *_: Any, **options: Any) -> AttentionOutput:
        self._take(1.0, self._clock.steps.pop(0))
        return AttentionOutput(query.clone(), query.new_zeros(1))

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        *_: Any,
        packed: Tensor | None,
        on_kv_gradients: Callable[..., None] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        seconds, later = self._clock.steps.pop(0), self._clock.query_share if on_kv_gradients else 0.0
        grads = key.float().new_zeros(2, *key.shape), None if packed is None else packed.float()
        self._take(1.0 - later, seconds)
        if on_kv_gradients is not None:
            on_kv_gradients(*grads)
        self._take(later, seconds)
        return query, *grads

    def _take(self, share: float, seconds: Tensor) -> None:
        self._clock.now = self._clock.now + share * seconds
