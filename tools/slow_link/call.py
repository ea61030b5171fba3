"""One attention call on either clock: ranks that wait for real links, and the planner's clock of all ranks.

Both run the ring's own autograd function on transports of which every wait is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_mtraining.commands.balance.synthetic import IndexShape, synthetic_index
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.metrics import RingWork, rank_pairs, work_of_pairs
from megatron_mtraining.planner.clock import CallSizes, ClockKernels, RingClock, step_seconds
from megatron_mtraining.planner.profile import PROFILES, Profile
from megatron_mtraining.ring import RingAttention, RingSchedule, RingShape, post_kv
from megatron_mtraining.transport import Pending, RingTransports
from megatron_mtraining.transport.base import Received
from megatron_mtraining.types import AttentionOutput

SEQ, HEADS = 8192, 8
QUERY_SHARE = 3 / 7  # of a backward step, as the planner counts it: dQ, after dK and dV have left
SHAPE = IndexShape(distances=16, local=4, verticals=0, sinks=0, run=4)
ROLES = ("inner", "outer", "inner_gradient", "outer_gradient")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Measured rates and latencies of a rank's links."""

    inner_mb_s: float
    outer_mb_s: float
    inner_latency_us: float
    outer_latency_us: float
    flat_mb_s: float
    """Of the links between nodes in a flat ring: each connection then carries one direction."""

    def outer_seconds(self, num_bytes: int) -> float:
        """Return the time of one transfer between nodes."""
        return 1e-6 * (self.outer_latency_us + num_bytes / self.outer_mb_s)


class Setting(NamedTuple):
    """One row: a layout and schedule at a ratio of outer transfer to inner compute."""

    layout: str
    schedule: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a rank's call."""

    num_nodes: int
    node_size: int
    head_dim: int  # of one key/value head: sets the bytes that travel

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.node_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of a rank's keys and values, bfloat16."""
        return 4 * SEQ // self.num_ranks * self.head_dim

    def ring(self, schedule: str) -> RingShape:
        """Return the steps of a schedule."""
        return RingShape(kind=schedule, cp_size=self.num_ranks, node_size=self.node_size)

    def work(self, layout: str, schedule: str) -> RingWork:
        """Count the pairs of a drawn index by rank and step."""
        index = synthetic_index(SHAPE, seq_len=SEQ, num_lists=HEADS)
        tokens = SequenceLayout(layout, seq_len=SEQ, cp_size=self.num_ranks, node_size=self.node_size)
        return work_of_pairs(*rank_pairs(index, tokens), self.ring(schedule).source_ranks())

    def profile(self, links: Links, work: RingWork, setting: Setting) -> Profile:
        """Return rates under which the mean rank computes a node's keys, forward, in ``1 / ratio`` outer transfers."""
        outer_mb_s = links.flat_mb_s if setting.schedule == "flat" else links.outer_mb_s
        pairs_of_node = float(work.stages.sum(1).double().mean()) / self.num_nodes
        tflops = 4e-12 * pairs_of_node * self.head_dim / (links.outer_seconds(self.kv_bytes) / setting.ratio)
        zeros = {field.name: 0.0 for field in fields(Profile) if field.name.endswith("_us")}
        rates = {name: tflops for name in ("slash_forward_tflops", "slash_backward_tflops")}
        own = {"inner_latency_us": links.inner_latency_us, "outer_latency_us": links.outer_latency_us}
        own |= {"inner_gb_s": links.inner_mb_s / 1e3, "outer_gb_s": outer_mb_s / 1e3}
        return replace(PROFILES["h200"], **(zeros | rates | own), source="measured links, timed waits")


class Times(NamedTuple):
    """Seconds of one direction: until the end, and of waits by level for keys and for gradients. Numbers or tensors."""

    end: Any
    waits: dict[str, Any]


class MeasuredGroups:
    """Groups of a ring whose waits are added up by role.

    In a flat ring, whose one group has links of both levels, the level is that of the link from the predecessor.
    """

    def __init__(
        self,
        groups: RingTransports,
        is_outer: Tensor | bool,
        now: Callable[[], Any],
        flat: bool,
        reduces_at_once: bool = False,
    ) -> None:
        self.waits: dict[str, Any] = dict.fromkeys(ROLES, 0.0)
        self._is_outer, self._now, self._flat = is_outer, now, flat
        self.reduces_at_once = reduces_at_once
        own = {role: _MeasuredTransport(getattr(groups, role), role, self) for role in ROLES}
        self.groups = RingTransports(cp=groups.cp, **own)

    def add(self, role: str, start: Any) -> None:
        """Add a wait that ends now."""
        waited = self._now() - start
        if not self._flat:
            self.waits[role] = self.waits[role] + waited
            return
        for level, share in (("inner", 1.0 - self._is_outer), ("outer", 1.0 * self._is_outer)):
            name = level + role.removeprefix("inner")
            self.waits[name] = self.waits[name] + share * waited

    def now(self) -> Any:
        """Return the present."""
        return self._now()


class _MeasuredTransport:
    """Transport whose posts and waits are measured: what gloo does at once, it does in the post."""

    def __init__(self, transport: Any, role: str, groups: MeasuredGroups) -> None:
        self._transport, self._role, self._groups = transport, role, groups
        self.rank, self.size, self.global_ranks = transport.rank, transport.size, transport.global_ranks

    def exchange(self, tensor: Tensor) -> _MeasuredPending:
        return self._post(self._transport.exchange, tensor)

    def post_all_gather(self, tensor: Tensor) -> _MeasuredPending:
        return self._post(self._transport.post_all_gather, tensor)

    def post_reduce_scatter(self, tensor: Tensor) -> Pending:
        pending = self._post(self._transport.post_reduce_scatter, tensor)
        return Received(pending.wait()) if self._groups.reduces_at_once else pending

    def _post(self, post: Callable[[Tensor], Any], tensor: Tensor) -> _MeasuredPending:
        start = self._groups.now()
        pending = post(tensor)
        self._groups.add(self._role, start)
        return _MeasuredPending(pending, self._role, self._groups)


class _MeasuredPending(NamedTuple):
    pending: Any
    role: str
    groups: MeasuredGroups

    def wait(self) -> Tensor:
        start = self.groups.now()
        received = self.pending.wait()
        self.groups.add(self.role, start)
        return received


class WaitKernels(ClockKernels):
    """Attention backend whose steps are timed waits."""

    name = "wait"

    def __init__(self, query_share: float) -> None:
        self.query_share = query_share
        self.steps: list[float] = []
        super().__init__(self)

    def pack(self, *_: Any) -> None:
        return None

    def forward(self, query: Tensor, *_: Any, **options: Any) -> AttentionOutput:
        self._take(1.0, self.steps.pop(0))
        return AttentionOutput(query, query.new_zeros(1))

    def _take(self, share: float, seconds: float) -> None:
        time.sleep(share * seconds)


class _ClockKernels(ClockKernels):
    """The planner's, without columns."""

    def pack(self, *_: Any) -> None:
        return None


def run_call(
    schedule: RingSchedule,
    measured: MeasuredGroups,
    kernels: Any,
    tensors: tuple[Tensor, ...],
    begin: Callable[[str], Any],
) -> dict[str, Times]:
    """Run forward and backward of the ring.

    Args:
        schedule: of the calling rank.
        measured: its groups.
        kernels: its backend.
        tensors: query, key and value.
        begin: called before each direction: returns its start.
    """
    context = SimpleNamespace(
        schedule=schedule,
        groups=measured.groups,
        backend=kernels,
        softmax_scale=1.0,
        own_geometry=None,
        geometry=lambda source_ranks: None,
    )
    query, key, value = tensors
    results = {}
    for direction in DIRECTIONS:
        start = begin(direction)
        measured.waits = dict.fromkeys(ROLES, 0.0)
        if direction == "forward":
            posted = post_kv(key.detach(), value.detach(), schedule, measured.groups)
            out, _ = RingAttention.apply(query, key, value, context, posted, object)
        else:
            torch.autograd.grad(out, (query, key, value), torch.zeros_like(out))
        results[direction] = Times(measured.now() - start, dict(measured.waits))
    return results


class Prediction(NamedTuple):
    """Milliseconds of one direction."""

    ms: float
    waits_ms: dict[str, float]
    """Mean rank, by role."""

    bound_ms: float
    """The larger of the busiest rank's compute and what the busiest link carries."""


def predictions(sizes: Sizes, setting: Setting, links: Links, *, reduces_at_once: bool = True) -> dict[str, Prediction]:
    """Predict a row by the planner's clock, with measured links.

    Gloo has no reduce-scatter that is posted: the host waits for it at once (``reduces_at_once``), as NCCL does not.
    """
    work, ring = sizes.work(setting.layout, setting.schedule), sizes.ring(setting.schedule)
    profile = sizes.profile(links, work, setting)
    clock = RingClock(ring, profile, query_share=QUERY_SHARE)
    call = CallSizes(seq_len=SEQ, num_heads=1, num_kv_heads=1, head_dim=sizes.head_dim)
    is_outer = (torch.arange(sizes.num_ranks) % sizes.node_size == 0).double()
    measured = MeasuredGroups(
        clock.groups(call, pack_width=0),
        is_outer,
        lambda: clock.now.clone(),
        flat=setting.schedule == "flat",
        reduces_at_once=reduces_at_once,
    )
    tensors = tuple(torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    sent, seconds = {}, {}

    def begin(direction: str) -> Tensor:
        if direction == "backward":
            sent["forward"] = clock.sent.clone()
        seconds[direction] = step_seconds(direction, work, profile, ring=ring, head_dim=sizes.head_dim)
        clock.start(seconds[direction])
        return clock.now.clone()

    times = run_call(ring.schedule, measured, _ClockKernels(clock), tensors, begin)
    sent["backward"] = clock.sent
    results = {}
    for direction, each in times.items():
        of_links = (sent[direction].amax(1) * clock.seconds_per_byte).amax()
        bound = max(float(seconds[direction].sum(1).max()), float(of_links))
        waits = {role: 1e3 * float(torch.as_tensor(waited).mean()) for role, waited in each.waits.items()}
        results[direction] = Prediction(1e3 * float(each.end.max()), waits, 1e3 * bound)
    return results
