"""How keys come by and how their gradients go home: the moving half of Algorithm 2 of the MTraining paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..transport import Pending, Transport
from .rings import Rings
from .schedule import RingRound, RingSchedule, RingStep


@dataclass(slots=True)
class Departure:
    """The keys and values that a round starts with, and the transfers of its first step, which are under way."""

    held: Tensor | tuple[Tensor, Tensor] | None
    """``[2, batch, local_len, num_kv_heads, head_dim]``, or key and value apart where they do not travel."""

    outer: Pending | None
    """To the next node, in all rounds but the last."""

    inner: Pending | tuple[Pending, Pending] | None
    """Round the node; or the gathers of key and of value; nothing in a node of one rank."""

    def take(self) -> tuple[Any, Pending | None, Any]:
        """All three, once: what no transfer needs lives as long as the steps need it, whoever keeps this object."""
        taken = self.held, self.outer, self.inner
        self.held = self.outer = self.inner = None
        return taken


def depart(key: Tensor, value: Tensor, schedule: RingSchedule, rings: Rings) -> Departure:
    """Posts the first transfers of this rank's own keys and values. They depend on no index."""
    held = torch.stack((key, value)) if schedule.sends else (key, value)  # what travels is one tensor
    return _depart(held, schedule.rounds[0], schedule, rings)


def _depart(held: Any, ring_round: RingRound, schedule: RingSchedule, rings: Rings) -> Departure:
    outer = rings.outer.exchange(held) if ring_round.sends_outer else None
    if schedule.gathers:
        return Departure(held, outer, tuple(rings.inner.post_all_gather(tensor) for tensor in held))
    return Departure(held, outer, rings.inner.exchange(held) if ring_round.steps[0].sends_inner else None)


def ring_rounds(
    departure: Departure, schedule: RingSchedule, rings: Rings
) -> Iterator[tuple[RingRound, Iterator[tuple[RingStep, Tensor, Tensor]]]]:
    """Each round, whose keys are already under way to the next node too, with its steps.

    A step comes with the keys and values in hand, whose transfer inside the node is already under way. Two sets of them
    exist at a time, one in hand and one arriving, if the caller lets go of a step's before it asks for the next.

    Args:
        departure: of this rank's own keys and values: what :func:`depart` returned.
        schedule: this rank's rounds.
        rings: the groups to send in.
    """
    arrived = None
    for ring_round in schedule.rounds:
        if arrived is not None:
            departure = _depart(arrived, ring_round, schedule, rings)
        held, transfer, arriving = departure.take()
        steps = _inner_steps(ring_round, held, arriving, schedule, rings)
        arrived = held = arriving = None
        yield ring_round, steps
        arrived = None if transfer is None else transfer.wait()


def _inner_steps(
    ring_round: RingRound, held: Any, arriving: Any, schedule: RingSchedule, rings: Rings
) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
    if schedule.gathers:
        ((step,), gathered) = ring_round.steps, [_end_to_end(gather.wait()) for gather in arriving]
        arriving = None  # with a batch, what arrived is no longer what the step takes
        yield step, *gathered
        return
    for step, next_step in zip(ring_round.steps, (*ring_round.steps[1:], None), strict=True):
        yield step, *(held.unbind() if isinstance(held, Tensor) else held)
        if next_step is not None:
            held = arriving.wait()
            arriving = rings.inner.exchange(held) if next_step.sends_inner else None


class GradientSum(Protocol):
    """Sums what the ranks of one group contribute to the gradients of each other's keys."""

    def add(self, contribution: Tensor) -> None:
        """Takes this rank's contribution of the current step; the caller does not touch it afterwards."""
        ...

    @property
    def sends(self) -> bool:
        """Whether the next contribution goes to another rank at once."""
        ...

    def total(self) -> Tensor:
        """The sum of all ranks' contributions to this rank's own keys. Called once, after the last step."""
        ...


class RingSum:
    """Sums that travel round a ring behind the keys they belong to.

    Call number ``s`` of :meth:`add` gives the contribution to the keys of rank - s. The first is to this rank's own
    keys and stays; every later one joins the sum that arrives from rank - 1 and travels on during the next step.
    After ``size - 1`` hops each sum is at home.
    """

    def __init__(self, ring: Transport) -> None:
        self._ring = ring
        self._own: Tensor | None = None
        self._arriving: Pending | None = None

    @property
    def sends(self) -> bool:
        """All but the first."""
        return self._own is not None

    def add(self, contribution: Tensor) -> None:
        """Takes the contribution of the current step."""
        if self._own is None:
            self._own = contribution
            return
        if self._arriving is not None:
            contribution = self._arriving.wait().add_(contribution)
        self._arriving = self._ring.exchange(contribution)

    def total(self) -> Tensor:
        """The sum for this rank's own keys."""
        if self._arriving is not None:
            self._own.add_(self._arriving.wait())
        return self._own


class GatheredSum:
    """The sum for ``gather``: one contribution holds those to the keys of all ranks of the group, end to end."""

    sends = True

    def __init__(self, group: Transport) -> None:
        self._group = group
        self._arriving: Pending | None = None

    def add(self, contribution: Tensor) -> None:
        """Takes ``[2, batch, size * local_len, num_kv_heads, head_dim]``."""
        parts = contribution.unflatten(2, (self._group.size, -1))
        self._arriving = self._group.post_reduce_scatter(parts.movedim(2, 0).contiguous())

    def total(self) -> Tensor:
        """The sum for this rank's own keys."""
        return self._arriving.wait()


class HomewardSums:
    """The gradients of all keys on their way home: round the node behind each step, between nodes behind each round."""

    def __init__(self, schedule: RingSchedule, rings: Rings) -> None:
        self._schedule, self._rings = schedule, rings
        self._outer_sum = RingSum(rings.outer_gradient)
        self._node_sum: GradientSum | None = None

    def begin_round(self) -> None:
        """Before the steps of a round."""
        gathers, group = self._schedule.gathers, self._rings.inner_gradient
        self._node_sum = GatheredSum(group) if gathers else RingSum(group)

    def sends(self, *, is_last: bool) -> bool:
        """Whether the contribution of the next step, perhaps the last of all, goes to another rank at once."""
        return self._node_sum.sends or (is_last and self._outer_sum.sends)

    def add(self, contribution: Tensor, *, is_last: bool) -> None:
        """Takes the contribution of the current step. In the last of all the sums go on to the next node at once."""
        self._node_sum.add(contribution)
        if is_last and self._outer_sum.sends:
            self.end_round()

    def end_round(self) -> None:
        """After the steps of a round."""
        if self._node_sum is not None:
            self._outer_sum.add(self._node_sum.total())
            self._node_sum = None

    def total(self) -> Tensor:
        """The sum of all ranks' contributions to this rank's own keys. Called once, after the last round."""
        return self._outer_sum.total()


def _end_to_end(gathered: Tensor) -> Tensor:
    """``[size, batch, local_len, ...]`` to ``[batch, size * local_len, ...]``; a view where batch is 1."""
    return torch.flatten(gathered.movedim(0, 1), 1, 2)
