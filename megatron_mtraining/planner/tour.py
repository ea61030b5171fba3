"""Whose keys every rank meets when, by arithmetic: ``ring_schedule`` of all ranks at once, for a thousand of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import SCHEDULES
from ..errors import invalid
from ..metrics import RingWork
from .owner_pairs import OwnerPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTour:
    """The rounds and steps of a schedule.

    Raises:
        ValueError: unknown ``kind``, or ranks that do not fill whole nodes.
    """

    kind: str
    """``flat``, ``hierarchical`` or ``gather``."""

    cp_size: int
    """Ranks in the ring."""

    node_size: int
    """Ranks in a node; a smaller ring lies in one node."""

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise invalid("schedule", f"one of {', '.join(SCHEDULES)}", repr(self.kind))
        for name in ("cp_size", "node_size"):
            if getattr(self, name) < 1:
                raise invalid(name, "at least 1", getattr(self, name))
        if self.cp_size > self.node_size and self.cp_size % self.node_size:
            raise invalid("cp_size", f"up to the {self.node_size} ranks of a node or a multiple of it", self.cp_size)

    @property
    def gathers(self) -> bool:
        """Whether a node's keys are gathered instead of travelling round it."""
        return self.kind == "gather"

    @property
    def inner_size(self) -> int:
        """Ranks in one inner ring: a node, or for ``flat`` the whole group."""
        return self.cp_size if self.kind == "flat" else min(self.node_size, self.cp_size)

    @property
    def num_rounds(self) -> int:
        """Turns of the outer ring."""
        return self.cp_size // self.inner_size

    @property
    def steps_of_round(self) -> int:
        """Steps of the inner loop."""
        return 1 if self.gathers else self.inner_size

    @property
    def inner_predecessor(self) -> Tensor:
        """int64 ``[cp_size]``: from whom each rank receives in its inner ring."""
        node, place = self._node_and_place()
        return node * self.inner_size + (place - 1) % self.inner_size

    @property
    def outer_predecessor(self) -> Tensor:
        """int64 ``[cp_size]``: from whom each rank receives in its outer ring."""
        node, place = self._node_and_place()
        return (node - 1) % self.num_rounds * self.inner_size + place

    def sources(self) -> Tensor:
        """int64 ``[cp_size, rounds, inner_size]``: whose keys each rank meets, ``gather`` a node's at once."""
        node, place = (each[:, None, None] for each in self._node_and_place())
        turn, step = torch.arange(self.num_rounds)[:, None], torch.arange(self.inner_size)
        return (node - turn) % self.num_rounds * self.inner_size + (place - step) % self.inner_size

    def work(self, pairs: OwnerPairs, *, verticals_in_ring: bool = False) -> RingWork:
        """The pairs by rank and step.

        Args:
            pairs: by rank, as :func:`rank_pairs` counts them.
            verticals_in_ring: whether a vertical pair is computed when its key comes by, as its slashes are, and not
                in the first step from rows that were gathered once.
        """
        meant = pairs.slash + pairs.vertical if verticals_in_ring else pairs.slash
        by_source = meant.gather(1, self.sources().flatten(1))
        if self.gathers:
            by_source = by_source.unflatten(1, (self.num_rounds, -1)).sum(2)
        at_once = torch.zeros_like(pairs.vertical[:, 0]) if verticals_in_ring else pairs.vertical.sum(1)
        return RingWork(by_source, at_once)

    def _node_and_place(self) -> tuple[Tensor, Tensor]:
        rank = torch.arange(self.cp_size)
        return rank // self.inner_size, rank % self.inner_size
