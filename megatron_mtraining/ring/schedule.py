"""What each rank computes in each ring step, and what it sends meanwhile. Integers only.

Ranks are numbered inside the context-parallel group: rank ``node * inner_size + place``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import SCHEDULES
from ..errors import invalid


@dataclass(frozen=True, slots=True)
class RingStep:
    """The local queries meet the keys in hand."""

    source_ranks: tuple[int, ...]
    """Whose keys are in hand, end to end in this order: one rank's, or with ``gather`` those of a whole node."""

    sends_inner: bool
    """Whether the keys in hand travel on to the next rank of the node while this step computes."""


@dataclass(frozen=True, slots=True)
class RingRound:
    """One turn of the outer ring: everything that is computed on the keys of one node."""

    sends_outer: bool
    """Whether the keys that this round started with travel on to the next node while the whole round computes."""

    steps: tuple[RingStep, ...]
    """The inner loop."""

    def is_last(self, step: RingStep) -> bool:
        """Whether no step follows ``step`` of this round: what nobody is waiting for is not sent on."""
        return not (self.sends_outer or step.sends_inner)


@dataclass(frozen=True, slots=True)
class RingSchedule:
    """All rounds of one rank, in order."""

    kind: str
    """``flat``, ``hierarchical`` or ``gather``."""

    inner_size: int
    """Ranks in one inner ring: a node, or for ``flat`` the whole group."""

    rounds: tuple[RingRound, ...]
    """One for each node, this rank's own first."""

    @property
    def gathers(self) -> bool:
        """Whether a node's keys are gathered instead of travelling round it."""
        return self.kind == "gather" and self.inner_size > 1

    @property
    def sends(self) -> bool:
        """Whether this rank's keys travel; gathered ones do so only between nodes."""
        return any(ring_round.sends_outer or ring_round.steps[0].sends_inner for ring_round in self.rounds)

    @property
    def source_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Whose keys this rank meets in each step, over all rounds: what a replay of the balance needs."""
        return tuple(step.source_ranks for ring_round in self.rounds for step in ring_round.steps)


@lru_cache(maxsize=128)
def ring_schedule(kind: str, *, cp_rank: int, cp_size: int, inner_size: int) -> RingSchedule:
    """The schedule of one rank: Algorithm 2 of the MTraining paper, of which a flat ring is the case of one node.

    Each round posts the transfer of its keys to the next node first and then runs the whole inner loop, so that the
    slow transfer has a round's time. The last step of a round sends nothing inside the node, the last round nothing
    outside. Kept for the next layers, which ask for the same.

    Args:
        kind: ``flat`` (one ring over all ranks), ``hierarchical`` (an inner ring in each round of an outer one) or
            ``gather`` (as hierarchical, but a node's keys are gathered and computed on in one step).
        cp_rank: this rank's number in the context-parallel group.
        cp_size: ranks in the group.
        inner_size: ranks in a node; ``flat`` does not use it.

    Raises:
        ValueError: unknown ``kind``, ``cp_rank`` outside the group, or ``inner_size`` that does not divide it.
    """
    if kind not in SCHEDULES:
        raise invalid("schedule", f"one of {', '.join(SCHEDULES)}", repr(kind))
    if not 0 <= cp_rank < cp_size:
        raise invalid("cp_rank", f"in [0, {cp_size})", cp_rank)
    if kind == "flat":
        inner_size = cp_size
    if inner_size < 1 or cp_size % inner_size:
        raise invalid("inner_size", f"a divisor of the context-parallel size {cp_size}", inner_size)
    num_nodes = cp_size // inner_size
    node, place = divmod(cp_rank, inner_size)
    rounds = []
    for turn in range(num_nodes):
        first_rank = (node - turn) % num_nodes * inner_size
        steps = (
            _gathered_step(first_rank, inner_size) if kind == "gather" else _inner_ring(first_rank, place, inner_size)
        )
        rounds.append(RingRound(sends_outer=turn + 1 < num_nodes, steps=steps))
    return RingSchedule(kind, inner_size, tuple(rounds))


def _inner_ring(first_rank: int, place: int, inner_size: int) -> tuple[RingStep, ...]:
    """Keys go to the next place after each step, so this place meets those of the one before it next."""
    return tuple(
        RingStep((first_rank + (place - step) % inner_size,), sends_inner=step + 1 < inner_size)
        for step in range(inner_size)
    )


def _gathered_step(first_rank: int, inner_size: int) -> tuple[RingStep, ...]:
    return (RingStep(tuple(range(first_rank, first_rank + inner_size)), sends_inner=False),)
