"""How keys come by and how their gradients go home: the moving half of Algorithm 2 of the MTraining paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..transport import Pending, Transport
from .rings import Rings
from .schedule import RingRound, RingSchedule, RingStep


def ring_rounds(
    key: Tensor, value: Tensor, schedule: RingSchedule, rings: Rings
) -> Iterator[tuple[RingRound, Iterator[tuple[RingStep, Tensor, Tensor]]]]:
    """Each round, whose keys are already under way to the next node too, with its steps.

    A step comes with the keys and values in hand, whose transfer inside the node is already under way. Two sets of them
    exist at a time, one in hand and one arriving, if the caller lets go of a step's before it asks for the next.

    Args:
        key: ``[batch, local_len, num_kv_heads, head_dim]``, this rank's own.
        value: as ``key``.
        schedule: this rank's rounds.
        rings: the groups to send in.
    """
    held = torch.stack((key, value)) if schedule.sends else (key, value)  # what travels is one tensor
    for ring_round in schedule.rounds:
        transfer = rings.outer.exchange(held) if ring_round.sends_outer else None
        steps = _inner_steps(ring_round, held, schedule, rings)
        held = None  # what no transfer needs lives as long as the steps need it
        yield ring_round, steps
        held = None if transfer is None else transfer.wait()


def _inner_steps(
    ring_round: RingRound, held: Tensor | tuple[Tensor, Tensor], schedule: RingSchedule, rings: Rings
) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
    if schedule.gathers:
        ((step,), gathered) = ring_round.steps, [_end_to_end(rings.inner.all_gather(tensor)) for tensor in held]
        yield step, *gathered
        return
    for step in ring_round.steps:
        transfer = rings.inner.exchange(held) if step.sends_inner else None
        yield step, *held
        if transfer is not None:
            held = transfer.wait()


class GradientSum(Protocol):
    """Sums what the ranks of one group contribute to the gradients of each other's keys."""

    def add(self, contribution: Tensor) -> None:
        """Takes this rank's contribution of the current step; the caller does not touch it afterwards."""
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

    def __init__(self, group: Transport) -> None:
        self._group = group
        self._own: Tensor | None = None

    def add(self, contribution: Tensor) -> None:
        """Takes ``[2, batch, size * local_len, num_kv_heads, head_dim]``."""
        parts = contribution.unflatten(2, (self._group.size, -1))
        self._own = self._group.reduce_scatter(parts.movedim(2, 0).contiguous())

    def total(self) -> Tensor:
        """The sum for this rank's own keys."""
        return self._own


def inner_sum(schedule: RingSchedule, rings: Rings) -> GradientSum:
    """What brings gradients home inside the node, for one round."""
    return GatheredSum(rings.inner_gradient) if schedule.gathers else RingSum(rings.inner_gradient)


def _end_to_end(gathered: Tensor) -> Tensor:
    """``[size, batch, local_len, ...]`` to ``[batch, size * local_len, ...]``; a view where batch is 1."""
    return torch.flatten(gathered.movedim(0, 1), 1, 2)
