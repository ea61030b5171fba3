"""When a ring attention call is done: the clock of every rank through Algorithm 2 of the MTraining paper.

Follows ring/autograd.py and ring/circulate.py: the outer transfer is posted first, the inner loop computes, each step
over the transfer that brings the next one its keys, and then they synchronise. Ranks wait for their neighbours only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..metrics import RingWork, backward_flops, forward_flops
from .profile import Profile
from .tour import RingTour
from .traffic import CallSizes, Links, Messages, Route

_QUERY_SHARE = 3 / 7
"""Of a backward step: dQ takes three of the seven products, dK and dV four. Dense kernels make all in one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """Forward or backward of one layer's attention call."""

    gpu_ms: float
    """Until the last rank is done, where everything was launched ahead."""

    host_ms: float
    """What a host needs to launch it; 0 for dense kernels, whose hosts were not measured."""

    compute_ms: float
    """What the mean rank computes."""

    inner_bytes: int
    """What the busiest rank sends inside its node."""

    outer_bytes: int
    """What the busiest rank sends out of its node."""

    @property
    def ms(self) -> float:
        """How long it takes by itself: as long as the slower of the two, since kernels are launched ahead."""
        return max(self.gpu_ms, self.host_ms)

    @property
    def exposed_ms(self) -> float:
        """The GPU's waiting: for keys, for gathered rows and for busier ranks."""
        return self.gpu_ms - self.compute_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Both directions."""

    forward: Direction
    backward: Direction

    @property
    def ms(self) -> float:
        """Forward and backward together."""
        return self.forward.ms + self.backward.ms

    @property
    def gpu_ms(self) -> float:
        """The same where hosts are ahead."""
        return self.forward.gpu_ms + self.backward.gpu_ms


def predict(
    work: RingWork,
    tour: RingTour,
    sizes: CallSizes,
    profile: Profile,
    *,
    pack_width: int,
    is_dense: bool = False,
) -> Prediction:
    """Times of one layer's attention; of the GPU's, packing and selection are left out.

    Args:
        work: pairs by rank and step, over all heads.
        tour: the schedule that ``work`` was counted for.
        sizes: of the call.
        profile: of GPU and links.
        pack_width: vertical rows of each head that are gathered once; 0 where they come by in the ring or are none.
        is_dense: whether dense kernels compute.
    """
    messages = Messages.of(sizes, cp_size=tour.cp_size, pack_width=pack_width)
    directions = {}
    for name, run in (("forward", _run_forward), ("backward", _run_backward)):
        seconds = step_seconds(name, work, profile, head_dim=sizes.head_dim, is_dense=is_dense)
        links = Links(profile, cp_size=tour.cp_size, node_size=tour.node_size)
        done = run(seconds.unflatten(1, (tour.num_rounds, -1)), _Ring.of(tour, links, messages, is_dense=is_dense))
        inner, outer = links.sent_bytes.amax(1).tolist()
        directions[name] = Direction(
            gpu_ms=1e3 * float(done.max()),
            host_ms=0.0 if is_dense else host_ms(name, tour, profile),
            compute_ms=1e3 * float(seconds.sum(1).mean()),
            inner_bytes=round(inner),
            outer_bytes=round(outer),
        )
    return Prediction(**directions)


def host_ms(direction: str, tour: RingTour, profile: Profile) -> float:
    """What a host needs to launch one layer's attention ``forward``, with its selection, or ``backward``."""
    once, of_step = (getattr(profile, f"host_{direction}{each}_us") for each in ("", "_step"))
    return 1e-3 * (once + tour.num_rounds * tour.steps_of_round * of_step)


def step_seconds(direction: str, work: RingWork, profile: Profile, *, head_dim: int, is_dense: bool = False) -> Tensor:
    """float64 ``[cp_size, steps]``: how long each rank computes in each step.

    Args:
        direction: ``forward`` or ``backward``.
        work: pairs by rank and step.
        profile: of the GPU.
        head_dim: of the tensors.
        is_dense: whether dense kernels compute.
    """
    flops = forward_flops if direction == "forward" else backward_flops
    kinds = ("dense", "dense") if is_dense else ("slash", "vertical")
    rates = [1e12 * getattr(profile, f"{kind}_{direction}_tflops") for kind in kinds]
    slash, vertical = (flops(pairs.double(), head_dim=head_dim) for pairs in (work.slash, work.vertical))
    seconds = slash / rates[0] + 1e-6 * getattr(profile, f"gpu_{direction}_step_us")
    seconds[:, 0] += vertical / rates[1]
    return seconds


@dataclass(frozen=True, slots=True)
class _Ring:
    """What a run goes through."""

    tour: RingTour
    links: Links
    messages: Messages
    inner: Route
    outer: Route
    query_share: float

    @classmethod
    def of(cls, tour: RingTour, links: Links, messages: Messages, *, is_dense: bool) -> _Ring:
        routes = (links.route(predecessor) for predecessor in (tour.inner_predecessor, tour.outer_predecessor))
        return cls(tour, links, messages, *routes, query_share=0.0 if is_dense else _QUERY_SHARE)


def _run_forward(seconds: Tensor, ring: _Ring) -> Tensor:
    """float64 ``[cp_size]``: when each rank is done. ``seconds`` is ``[cp_size, rounds, steps]``.

    Keys set off before rows are gathered; that they do so before the selection too is not counted.
    """
    now = seconds.new_zeros(len(seconds))
    for turn in range(ring.tour.num_rounds):
        keys = _Keys(now, turn, ring)
        now = keys.gathered(now)
        for step in range(ring.tour.steps_of_round):
            keys.post(now, step)
            if turn == step == 0:
                now = ring.links.all_reduce(now, ring.messages.packs)
            now = keys.arrived(now + seconds[:, turn, step])
        now = keys.arrived_from_outside(now)
    return now


def _run_backward(seconds: Tensor, ring: _Ring) -> Tensor:
    """As :func:`_run_forward`; gradients of keys travel behind them, those of the packs from the first step on.

    Where gradients of keys go to another rank at once they are made first, and those of queries under the transfer.
    """
    now = seconds.new_zeros(len(seconds))
    sums = _HomewardSums(ring)
    for turn in range(ring.tour.num_rounds):
        keys = _Keys(now, turn, ring)
        now = keys.gathered(now)
        sums.begin_round()
        for step in range(ring.tour.steps_of_round):
            is_last = turn + 1 == ring.tour.num_rounds and step + 1 == ring.tour.steps_of_round
            keys.post(now, step)
            after = ring.query_share * seconds[:, turn, step] * sums.sends(is_last=is_last)
            now = sums.add(now + seconds[:, turn, step] - after, is_last=is_last) + after
            if turn == step == 0:
                packs = ring.links.all_reduce(now, ring.messages.pack_gradients)
            now = keys.arrived(now)
        now = sums.end_round(now)
        now = keys.arrived_from_outside(now)
    return torch.maximum(sums.total(now), packs)


class _Keys:
    """The moving keys of one round."""

    def __init__(self, now: Tensor, turn: int, ring: _Ring) -> None:
        self._ring = ring
        self._inner: Tensor | None = None
        self._outer = self._posted(now, ring.outer) if turn + 1 < ring.tour.num_rounds else None

    def gathered(self, now: Tensor) -> Tensor:
        """When a round may compute."""
        ring = self._ring
        return ring.links.gather_in_node(now, ring.messages.keys) if ring.tour.gathers else now

    def post(self, now: Tensor, step: int) -> None:
        """Sends the keys in hand on, unless the round ends with this step."""
        self._inner = self._posted(now, self._ring.inner) if step + 1 < self._ring.tour.steps_of_round else None

    def arrived(self, now: Tensor) -> Tensor:
        """When the next step may compute."""
        return now if self._inner is None else torch.maximum(now, self._inner)

    def arrived_from_outside(self, now: Tensor) -> Tensor:
        """When the next round may start."""
        return now if self._outer is None else torch.maximum(now, self._outer)

    def _posted(self, now: Tensor, route: Route) -> Tensor:
        return self._ring.links.exchange(now, route, self._ring.messages.keys)


class _TravellingSum:
    """The clock of ``ring.circulate.RingSum``: the first contribution stays, each later one joins what arrives."""

    def __init__(self, route: Route, links: Links, num_bytes: int) -> None:
        self._route, self._links, self._num_bytes = route, links, num_bytes
        self._arriving: Tensor | None = None
        self.sends = False

    def add(self, now: Tensor) -> Tensor:
        """When the contribution has been taken."""
        if not self.sends:
            self.sends = True
            return now
        now = self.total(now)
        self._arriving = self._links.exchange(now, self._route, self._num_bytes)
        return now

    def total(self, now: Tensor) -> Tensor:
        """When what travels has arrived."""
        return now if self._arriving is None else torch.maximum(now, self._arriving)


class _GatheredSum:
    """The clock of ``ring.circulate.GatheredSum``."""

    sends = True

    def __init__(self, links: Links, num_bytes: int) -> None:
        self._links, self._num_bytes = links, num_bytes

    def add(self, now: Tensor) -> Tensor:
        """When the contribution is on its way."""
        self._arriving = self._links.gather_in_node(now, self._num_bytes)
        return now

    def total(self, now: Tensor) -> Tensor:
        """When the sum has arrived."""
        return torch.maximum(now, self._arriving)


class _HomewardSums:
    """The clock of ``ring.circulate.HomewardSums``."""

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring
        self._outer_sum = _TravellingSum(ring.outer, ring.links, ring.messages.gradients)

    def begin_round(self) -> None:
        """Before the steps of a round."""
        ring, num_bytes = self._ring, self._ring.messages.gradients
        self._node_sum = (
            _GatheredSum(ring.links, num_bytes)
            if ring.tour.gathers
            else _TravellingSum(ring.inner, ring.links, num_bytes)
        )

    def sends(self, *, is_last: bool) -> bool:
        """Whether the next contribution goes to another rank at once."""
        return self._node_sum.sends or (is_last and self._outer_sum.sends)

    def add(self, now: Tensor, *, is_last: bool) -> Tensor:
        """When the contribution has been taken, in the last step of all by the other node too."""
        now = self._node_sum.add(now)
        return self.end_round(now) if is_last and self._outer_sum.sends else now

    def end_round(self, now: Tensor) -> Tensor:
        """When a round's sums are on their way between nodes."""
        if self._node_sum is not None:
            now = self._outer_sum.add(self._node_sum.total(now))
            self._node_sum = None
        return now

    def total(self, now: Tensor) -> Tensor:
        """When all are at home."""
        return self._outer_sum.total(now)
