"""Every layout under every schedule on every number of ranks: computing, sending and time of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ...layout import SequenceLayout
from ...metrics import RingWork, rank_pairs, work_of_pairs
from ...planner.clock import CallSizes, Prediction, predict
from ...planner.profile import Profile
from ...ring import RingShape
from ...types import VerticalSlashIndex
from .owner_pairs import OwnerPairs, owner_pairs_of_ranks
from .token_striped import token_striped

TOKEN_STRIPED = "token_striped"
"""A layout to compare with, on which nothing here runs: token t on rank t mod W."""

GATHERED, IN_RING = "gathered", "in ring"
"""Vertical rows are computed once, in the first step, or in the step of their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One layer's attention under one layout and schedule."""

    ring: RingShape
    layout: str
    verticals: str
    work: RingWork
    """Useful pairs."""

    prediction: Prediction

    @property
    def name(self) -> str:
        """Layout, schedule and treatment of verticals."""
        return f"{self.layout}, {self.ring.kind}, verticals {self.verticals}"

    @property
    def gpu_ms(self) -> float:
        """Time of forward and backward where hosts are ahead."""
        return sum(each.gpu_ms for each in self.prediction)

    @property
    def ms(self) -> float:
        """Time of both, each by the slower of GPU and host."""
        return sum(each.ms for each in self.prediction)

    def numbers(self) -> dict[str, object]:
        """Return the printed and written numbers, by name."""
        forward, backward = self.prediction.forward, self.prediction.backward
        steps = self.work.imbalance_of_steps
        return {
            "ranks": self.ring.cp_size,
            "layout": self.layout,
            "schedule": self.ring.kind,
            "verticals": self.verticals,
            "worker_imbalance": self.work.worker_imbalance,
            "worst_step_imbalance": float(steps.max()),
            "lockstep_imbalance": self.work.step_imbalance,
            "inner_bytes": [forward.inner_bytes, backward.inner_bytes],
            "outer_bytes": [forward.outer_bytes, backward.outer_bytes],
            "forward_ms": forward.gpu_ms,
            "backward_ms": backward.gpu_ms,
            "host_forward_ms": forward.host_ms,
            "host_backward_ms": backward.host_ms,
            "exposed_ms": forward.exposed_ms + backward.exposed_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayer:
    """Replayer of one index."""

    index: VerticalSlashIndex
    sizes: CallSizes
    profile: Profile
    node_size: int
    _counted: dict[tuple[str, int], tuple[OwnerPairs, OwnerPairs]] = field(default_factory=dict, repr=False)

    def ring(self, schedule: str, cp_size: int) -> RingShape:
        """Return the steps of a schedule on this machine's nodes."""
        return RingShape(kind=schedule, cp_size=cp_size, node_size=self.node_size)

    def replays(self, cp_size: int, layouts: Sequence[str], schedules: Sequence[str]) -> Iterator[Replay]:
        """Replay all of one number of ranks, pairs counted once for each layout.

        Raises:
            ValueError: the sequence or the ranks do not divide as a layout or schedule needs.
        """
        shapes = [self.ring(schedule, cp_size) for schedule in schedules]
        for layout in layouts:
            for ring in shapes:
                for verticals in (GATHERED, IN_RING):
                    yield self._replay(ring, layout, verticals, *self._pairs(layout, cp_size))

    def dense(self, cp_size: int, *, layout: str, schedule: str) -> Replay:
        """Replay dense causal attention of the same sizes."""
        ring = self.ring(schedule, cp_size)
        one_head = VerticalSlashIndex.dense(
            rows=1, num_heads=1, seq_len=self.sizes.seq_len, block_size=self.index.block_size
        )
        slash, vertical = rank_pairs(one_head, self._layout(layout, cp_size))
        work = work_of_pairs(slash * self.sizes.num_heads, vertical, ring.source_ranks())
        prediction = predict(work, ring, self.sizes, self.profile, pack_width=0, is_dense=True)
        return Replay(ring=ring, layout=layout, verticals="none", work=work, prediction=prediction)

    def _pairs(self, layout: str, cp_size: int) -> tuple[OwnerPairs, OwnerPairs]:
        """Return useful and issued pairs, the same where a block stays whole."""
        counted = self._counted.get((layout, cp_size))
        if counted is None:
            if layout == TOKEN_STRIPED:
                striped = token_striped(self.index, seq_len=self.sizes.seq_len, cp_size=cp_size)
                counted = (striped.pairs, striped.issued)
            else:
                counted = (owner_pairs_of_ranks(self.index, self._layout(layout, cp_size)),) * 2
            self._counted[layout, cp_size] = counted
        return counted

    def _layout(self, kind: str, cp_size: int) -> SequenceLayout:
        return SequenceLayout(
            kind,
            seq_len=self.sizes.seq_len,
            cp_size=cp_size,
            block_size=self.index.block_size,
            node_size=min(self.node_size, cp_size),
        )

    def _replay(self, ring: RingShape, layout: str, verticals: str, useful: OwnerPairs, issued: OwnerPairs) -> Replay:
        in_ring = verticals == IN_RING
        work, computed = (work_of(ring, pairs, in_ring=in_ring) for pairs in (useful, issued))
        # One rank has all rows at hand.
        pack_width = 0 if in_ring or ring.cp_size == 1 else self.index.vertical.shape[-1]
        prediction = predict(computed, ring, self.sizes, self.profile, pack_width=pack_width)
        return Replay(ring=ring, layout=layout, verticals=verticals, work=work, prediction=prediction)


def work_of(ring: RingShape, pairs: OwnerPairs, *, in_ring: bool) -> RingWork:
    """Return work by rank and step; vertical pairs are in the first step, or ``in_ring``, in that of their keys."""
    sources = ring.source_ranks()
    if in_ring:
        return work_of_pairs(pairs.slash + pairs.vertical, torch.zeros_like(pairs.vertical[:, 0]), sources)
    return work_of_pairs(pairs.slash, pairs.vertical.sum(1), sources)
