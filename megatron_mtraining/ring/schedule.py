"""Schedule of the ring: the KV blocks of each ring step, and the transfers posted before it. Integers only.

Ranks are numbered inside the context-parallel group: rank ``node * inner_size + slot``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from ..config import SCHEDULES
from ..errors import invalid


@dataclass(frozen=True, slots=True)
class RingStep:
    """Attention of the local queries over the current KV block."""

    source_ranks: tuple[int, ...]
    """Ranks that own the current KV block, in its order: one rank, or with ``gather`` a whole node."""

    arrives_from: Literal["self", "inner", "outer", "held"]
    """Origin of the KV block: this rank itself, the previous rank of the node, the previous node, or ``held``: it came
    from the previous rank of the node before the keys of other nodes, which were computed first."""

    sends_outer: bool
    """True if the KV block travels to the next node during all steps of this node's keys."""

    sends_inner: bool
    """True if the KV block travels to the next rank of the node during this step."""

    ends_node: bool
    """True for the last step on the keys of one node."""

    is_last: bool
    """True for the last step of all."""


@dataclass(frozen=True, slots=True)
class RingSchedule:
    """All steps of one rank, in order."""

    kind: str
    """``flat``, ``hierarchical`` or ``gather``."""

    inner_size: int
    """Ranks in one inner ring: a node, or for ``flat`` the whole group."""

    steps: tuple[RingStep, ...]
    """Node by node, this rank's own first."""

    backward_steps: tuple[RingStep, ...]
    """The same steps in the order of a backward. In a ``hierarchical`` one of several nodes, other nodes' steps
    interrupt those of this rank's own."""

    @property
    def gathers(self) -> bool:
        """True if a node's keys are all-gathered instead of rotated."""
        return self.kind == "gather" and self.inner_size > 1

    @property
    def rotates(self) -> bool:
        """True if this rank's KV block is sent on by itself; an all-gather sends key and value apart."""
        return any(step.sends_outer or step.sends_inner for step in self.steps)

    @property
    def backward_order(self) -> tuple[int, ...]:
        """Position in ``steps`` of each step of a backward."""
        return tuple(self.source_ranks.index(step.source_ranks) for step in self.backward_steps)

    @property
    def source_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Owners of the KV block of each step."""
        return tuple(step.source_ranks for step in self.steps)


@lru_cache(maxsize=128)
def ring_schedule(kind: str, *, cp_rank: int, cp_size: int, inner_size: int) -> RingSchedule:
    """Return one rank's schedule: Algorithm 2 of the MTraining paper, of which a flat ring is the case of one node.

    The first step on a node's keys posts their transfer to the next node, so that the slow transfer has all steps of
    that node to complete. The last step of a node sends nothing inside the node, the last node nothing outside.

    Behind the last of other nodes' keys, a backward still has to send their gradients to the next node, in float32.
    Gradients of this rank's own node stay there, so a third of its steps is computed first, which covers the keys
    that travel, and the rest last, which covers these gradients.

    Cached: every layer asks for the same one.

    Args:
        kind: ``flat`` (one ring over all ranks), ``hierarchical`` (an inner ring in each step of an outer ring) or
            ``gather`` (as hierarchical, but a node's keys are all-gathered and computed in one step).
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
    node, slot = divmod(cp_rank, inner_size)
    nodes: list[list[RingStep]] = []
    for outer_step in range(num_nodes):
        first_rank = (node - outer_step) % num_nodes * inner_size
        sources = _sources_in_node(kind, first_rank, slot, inner_size)
        nodes.append(
            [
                RingStep(
                    source_ranks,
                    arrives_from="inner" if inner_step else "outer" if outer_step else "self",
                    sends_outer=inner_step == 0 and outer_step + 1 < num_nodes,
                    sends_inner=inner_step + 1 < len(sources),
                    ends_node=inner_step + 1 == len(sources),
                    is_last=False,
                )
                for inner_step, source_ranks in enumerate(sources)
            ]
        )
    own, *others = nodes
    num_first = max(1, len(own) // 3) if others else len(own)
    held = [replace(step, arrives_from="held") for step in own[num_first : num_first + 1]]
    backward = [own[:num_first], *others, held, own[num_first + 1 :]]
    return RingSchedule(kind, inner_size, _in_order(nodes), _in_order(backward))


def _in_order(nodes: list[list[RingStep]]) -> tuple[RingStep, ...]:
    *earlier, last = chain.from_iterable(nodes)
    return (*earlier, replace(last, is_last=True))


def _sources_in_node(kind: str, first_rank: int, slot: int, inner_size: int) -> list[tuple[int, ...]]:
    """Owners of each step's KV block in one node; after a step the block moves to the next slot."""
    if kind == "gather":
        return [tuple(range(first_rank, first_rank + inner_size))]
    return [(first_rank + (slot - step) % inner_size,) for step in range(inner_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """A schedule over all ranks of a context-parallel group.

    Raises:
        ValueError: an unknown schedule, or ranks that do not fill whole nodes.
    """

    kind: str
    """``flat``, ``hierarchical`` or ``gather``."""

    cp_size: int
    node_size: int
    """Ranks in a node; a smaller ring lies in one node."""

    def __post_init__(self) -> None:
        if self.node_size < 1 or self.cp_size < 1 or self.cp_size % min(self.node_size, self.cp_size):
            raise invalid("cp_size", f"up to the {self.node_size} ranks of a node or a multiple of it", self.cp_size)
        _ = self.schedule  # raises for an unknown kind

    @property
    def schedule(self) -> RingSchedule:
        """Schedule of rank 0; every other rank's is the same, shifted by its node and its slot there."""
        inner_size = min(self.node_size, self.cp_size)
        return ring_schedule(self.kind, cp_rank=0, cp_size=self.cp_size, inner_size=inner_size)

    @property
    def num_steps(self) -> int:
        """Ring steps of a rank."""
        return len(self.schedule.steps)

    def source_ranks(self) -> Tensor:
        """Return int64 ``[cp_size, steps, sources]``: owners of the KV block of each rank in each step."""
        inner_size = self.schedule.inner_size
        own = torch.tensor(self.schedule.source_ranks, device="cpu")
        rank = torch.arange(self.cp_size, device="cpu")[:, None, None]
        node = (rank // inner_size + own // inner_size) % (self.cp_size // inner_size)
        return node * inner_size + (rank + own) % inner_size
