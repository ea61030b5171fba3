"""Layout and schedule of a run that names none: the replay of a few candidates, once, from integers and a profile.

The replay is coarse, so that its time does not grow with the ring: up to ``MOST_NODES`` nodes of up to ``MOST_RANKS``
ranks, and up to ``MOST_BLOCKS`` blocks of a rank, whose pairs are scaled. Bytes of a transfer and pairs of a step are
those of the whole ring, since both depend on the tokens of a rank and on the density alone.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..config import SCHEDULES, MTrainingConfig
from ..layout import SequenceLayout
from ..metrics import RingWork, rank_pairs, work_of_pairs
from ..metrics.indices import density_of_caps, drawn_index
from ..ring import RingShape
from ..ring.memory import backward_bytes
from ..tensors import cached_tensors
from ..types import VerticalSlashIndex
from .clock import CallSizes, predict
from .profile import Profile, profile_of_machine

_LOG = logging.getLogger(__name__)

LAYOUTS = ("striped", "node_striped")
"""Candidates of ``auto``: even over ranks and steps, and supported with the same flags of Megatron."""

MOST_NODES, MOST_RANKS, MOST_BLOCKS = 4, 16, 256

ALIKE, EVEN = 1.01, 1.02
"""Ratio of times below which candidates are equally fast, and lockstep imbalance below which they are equally even."""

PREFERRED = ("hierarchical", "gather", "flat")
"""Of equally fast and even ones: the least memory and traffic between nodes first."""

MOST_GATHERED = 0.05
"""Share of a GPU's memory that a gathering backward may take beyond a rotating one."""

ASSUMED_DENSITY = 0.1
"""Density where the budget does not decide it: of a recall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCall:
    """One layer's attention call on several ranks; the defaults are a typical one, for programs that give no sizes.

    Raises:
        ValueError: ranks that do not fill whole nodes.
    """

    cp_size: int
    node_size: int
    seq_len: int | None = None  # default: 16384 tokens a rank
    num_heads: int = 16
    num_kv_heads: int = 2
    head_dim: int = 128

    def __post_init__(self) -> None:
        RingShape(
            kind="hierarchical", cp_size=self.cp_size, node_size=self.node_size
        )  # raises where nodes are not full

    @property
    def local_len(self) -> int:
        """Tokens of a rank."""
        return 16384 if self.seq_len is None else max(self.seq_len // self.cp_size, 1)


class Candidate(NamedTuple):
    """A layout and schedule with their prediction."""

    layout: str
    schedule: str
    ms: float
    """Forward and backward of one layer's attention, in the coarse ring."""

    lockstep: float
    """Imbalance of ranks in lockstep, there."""

    def __str__(self) -> str:
        return f"{self.layout} {self.schedule} ({self.ms:.2f} ms, lockstep imbalance {self.lockstep:.3f})"


def decide(config: MTrainingConfig, call: RingCall, *, layout: str | None = None, log: bool = False) -> MTrainingConfig:
    """Return ``config`` with the layout and schedule that it leaves to ``auto``; the same on every rank.

    On one rank nothing is decided: every layout and schedule is the same there.

    Args:
        config: may name both, one or none.
        call: a typical call.
        layout: the layout of a batch that is split already.
        log: log the decision, once in a process.

    Raises:
        ValueError: ``config.profile`` names no profile.
    """
    layout = layout or config.layout
    if layout != "auto" and config.schedule != "auto":
        return replace(config, layout=layout)
    if call.cp_size == 1:
        changes = {"layout": "striped" if layout == "auto" else layout}
        return replace(config, **changes, schedule="hierarchical" if config.schedule == "auto" else config.schedule)
    density = density_of(config, call.local_len * call.cp_size)
    # The replay differentiates the ring itself. A thread of its own has none of the caller's inference mode, hooks of a
    # checkpoint, and default device.
    with ThreadPoolExecutor(max_workers=1) as thread:
        ranked, profile = thread.submit(candidates, call, density, config.profile, layout, config.schedule).result()
    best = ranked[0]
    if log:
        _log_once(call, density, ranked, profile)
    return replace(config, layout=best.layout, schedule=best.schedule)


def density_of(config: MTrainingConfig, seq_len: int) -> float:
    """Return the density that a configuration is expected to compute at."""
    if config.pattern == "dense" or seq_len <= config.dense_below:
        return 1.0
    if config.pattern == "vertical_slash" and config.budget != "cost":
        return density_of_caps(seq_len, max_vertical=config.max_vertical, max_slash=config.max_slash)
    return min(config.max_density or ASSUMED_DENSITY, 1.0)


@lru_cache(maxsize=64)
def candidates(
    call: RingCall, density: float, profile_name: str, layout: str, schedule: str
) -> tuple[tuple[Candidate, ...], str]:
    """Return the candidates, the chosen one first and then by time, and the name of the profile that timed them.

    Of those that take as long as the fastest, to a hundredth, an even one is chosen, and of these as ``PREFERRED`` has
    it: predictions are not better than that.
    """
    name, profile = profile_of_machine(profile_name)
    found = [
        _replayed(call, density, profile, each_layout, each_schedule)
        for each_layout in _layouts(call, layout)
        for each_schedule in (SCHEDULES if schedule == "auto" else (schedule,))
        if schedule != "auto" or _is_of_use(call, each_schedule, profile)
    ]
    slowest = ALIKE * min(each.ms for each in found)
    alike = [each for each in found if each.ms <= slowest]
    least_even = max(EVEN, min(each.lockstep for each in alike))
    even = (each for each in alike if each.lockstep <= least_even)
    chosen = min(even, key=lambda each: (PREFERRED.index(each.schedule), each.lockstep))
    others = sorted((each for each in found if each is not chosen), key=lambda each: each.ms)
    return (chosen, *others), name


def _layouts(call: RingCall, layout: str) -> tuple[str, ...]:
    if layout != "auto":
        return (layout,)
    return LAYOUTS if call.node_size < call.cp_size and call.node_size > 1 else LAYOUTS[:1]  # else both are the same


def _is_of_use(call: RingCall, schedule: str, profile: Profile) -> bool:
    """Return whether a schedule differs from the hierarchical one, and a gathering one takes little memory beyond."""
    if schedule == "flat":
        return 1 < call.node_size < call.cp_size
    if schedule != "gather":
        return True
    if call.seq_len is None:  # what a node gathers is not known
        return False
    bytes_of = {"query": 2 * call.local_len * call.num_heads * call.head_dim}
    bytes_of["kv"] = 4 * call.local_len * call.num_kv_heads * call.head_dim
    shapes = (
        RingShape(kind=kind, cp_size=call.cp_size, node_size=call.node_size) for kind in ("gather", "hierarchical")
    )
    gathered, rotated = (backward_bytes(ring, **bytes_of) for ring in shapes)
    return call.node_size > 1 and gathered - rotated <= MOST_GATHERED * profile.memory_gib * 2**30


def _replayed(call: RingCall, density: float, profile: Profile, layout: str, schedule: str) -> Candidate:
    nodes = min(call.cp_size // call.node_size, MOST_NODES)
    node_size = min(call.node_size, MOST_RANKS)
    ring = RingShape(kind=schedule, cp_size=nodes * node_size, node_size=node_size)
    blocks = 2 * max(min(call.local_len // MTrainingConfig().block_size, MOST_BLOCKS) // 2, 1)  # zigzag halves them
    drawn = _drawn_work(ring, layout, blocks, density)
    scale = (call.local_len / (blocks * MTrainingConfig().block_size)) ** 2 * call.num_heads / _HEADS
    work = RingWork(*(each.double() * scale for each in (drawn.slash, drawn.vertical)))
    sizes = CallSizes(
        seq_len=call.local_len * ring.cp_size,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
    )
    predicted = predict(work, ring, sizes, profile, pack_width=0)
    return Candidate(layout, schedule, predicted.forward.ms + predicted.backward.ms, drawn.step_imbalance)


_HEADS = 2  # of a drawn index: a pair of mirrored ones


@cached_tensors(maxsize=8)
def _drawn_work(ring: RingShape, layout: str, blocks: int, density: float) -> RingWork:
    config = MTrainingConfig()
    seq_len = blocks * ring.cp_size * config.block_size
    if density >= 1:
        index = VerticalSlashIndex.dense(rows=1, num_heads=_HEADS, seq_len=seq_len, block_size=config.block_size)
    else:
        max_slash = round(density * blocks * ring.cp_size)
        index = drawn_index(seq_len, num_heads=_HEADS, max_vertical=0, max_slash=max_slash)
    tokens = SequenceLayout(layout, seq_len=seq_len, cp_size=ring.cp_size, node_size=ring.node_size)
    return work_of_pairs(*rank_pairs(index, tokens), ring.source_ranks())


_logged: set[RingCall] = set()


def _log_once(call: RingCall, density: float, ranked: tuple[Candidate, ...], profile: str) -> None:
    if call in _logged:
        return
    _logged.add(call)
    best, *others = ranked
    second = f"next {others[0]}" if others else "the only candidate"
    fastest = min(ranked, key=lambda each: each.ms)
    reason = "fastest" if best is fastest else "as fast as the fastest to a hundredth, more even or of less traffic"
    _LOG.warning(
        "layout %s and schedule %s: %s for %d tokens on %d ranks in nodes of %d, %d/%d heads, density %.2g, by the "
        "profile %s: %s; %s. --mtraining-layout and --mtraining-schedule name others.",
        *(best.layout, best.schedule, reason, call.local_len * call.cp_size, call.cp_size, call.node_size),
        *(call.num_heads, call.num_kv_heads, density, profile, best, second),
    )
