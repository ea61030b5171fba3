"""Rates and costs of this GPU and its links with an index, from which a replay predicts a ring."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mtraining.commands.stopwatch import Stopwatch
from megatron_mtraining.metrics import backward_flops, forward_flops, rank_pairs
from megatron_mtraining.planner.clock import CallSizes
from megatron_mtraining.planner.profile import PROFILES, Profile
from megatron_mtraining.ring import RingShape
from megatron_mtraining.types import VerticalSlashIndex

from .dry_run import DryRun
from .layer import ParallelState, RingLayer
from .step_clock import DIRECTIONS, CallTimes

REPEATS = 5
SMALL_BYTES = 1024
MOST_APART = 4.0
"""Largest ratio between the rate of verticals, a difference of two times, and that of slashes."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration of one length and number of ranks; milliseconds, the mean over ranks.

    Steps are those of a dry run (``dry_run.py``), on a rank's queries and its own keys.
    """

    slash_pairs: float
    vertical_pairs: float
    forward_ms: float
    """Time of the first step, verticals and slashes."""

    slash_forward_ms: float
    """Time of a later step, slashes alone."""

    backward_ms: float
    slash_backward_ms: float
    empty_forward_ms: float
    """Time of a step without a pair: the cost of its tokens, whatever its index."""

    empty_backward_ms: float
    beside_forward_ms: float
    """Time that a transfer of a rank's keys, all of it beside one step, takes from that step."""

    beside_backward_ms: float
    exchange_ms: float
    exchange_bytes: int
    small_exchange_ms: float
    sm_mhz: float | None
    """Clock of the multiprocessors after dry runs."""

    def profile(self, direction: str, *, head_dim: int) -> Profile:
        """Return the planner's profile for one direction of these calls."""
        flops = forward_flops if direction == "forward" else backward_flops
        empty, slash, both = (getattr(self, f"{kind}{direction}_ms") for kind in ("empty_", "slash_", ""))
        slash_rate = _tflops(flops(self.slash_pairs, head_dim=head_dim), slash - empty)
        vertical_rate = _tflops(flops(self.vertical_pairs, head_dim=head_dim), both - slash)
        vertical_rate = min(max(vertical_rate, slash_rate / MOST_APART), slash_rate * MOST_APART)
        rates = {f"slash_{direction}_tflops": slash_rate, f"vertical_{direction}_tflops": vertical_rate}
        sending_ms = max(self.exchange_ms - self.small_exchange_ms, 1e-6)
        links = {"gb_s": self.exchange_bytes / sending_ms / 1e6, "latency_us": 1e3 * self.small_exchange_ms}
        links = {f"{level}_{name}": value for level in ("inner", "outer") for name, value in links.items()}
        step = {f"gpu_{direction}_step_us": 1e3 * empty}
        return replace(PROFILES["h200"], **rates, **links, **step, source="measured in the same run")

    def beside_ms(self, direction: str, ring: RingShape, sizes: CallSizes) -> Tensor:
        """Return float64 ``[steps]``: what the transfers beside each step take from it, in milliseconds.

        Keys travel beside a node's steps but the last, and between nodes from a node's first step on. In a backward
        the sum of gradients leaves in a node's second step and in each later one, beside the gradients of its queries;
        between nodes with the next node's first step, and the last time in the last step on another node.
        """
        is_backward, schedule = direction == "backward", ring.schedule
        gradients = torch.float32.itemsize / sizes.dtype.itemsize if is_backward else 0.0
        steps = schedule.backward_steps if is_backward else schedule.steps
        origins = [step.arrives_from for step in steps]
        last_elsewhere = (origins.index("held") if "held" in origins else len(steps)) - 1
        transfers, nodes_begun = [], 0
        for number, step in enumerate(steps):
            nodes_begun += step.arrives_from == "outer"
            sums = (step.arrives_from in ("inner", "held")) + (step.arrives_from == "outer" and nodes_begun > 1)
            sums += number == last_elsewhere and nodes_begun > 0
            transfers.append(step.sends_inner + step.sends_outer + sums * gradients)
        return torch.tensor(transfers, dtype=torch.float64) * getattr(self, f"beside_{direction}_ms")


def calibrate(
    layer: RingLayer,
    index: VerticalSlashIndex,
    parallel: ParallelState,
    stopwatch: Stopwatch,
    dry_run: DryRun,
    calls: dict[str, Sequence[CallTimes]],
) -> Calibration:
    """Return means over ranks of calls of a dry run, and of single operations that are timed here. A collective.

    Args:
        layer: that the dry run is of.
        index: of the call.
        place: of the rank.
        stopwatch: what times the rest.
        dry_run: whose operations these are.
        calls: ``alone`` and ``beside``, of this rank.
    """
    times: dict[str, float] = {}
    alone, beside = (CallTimes.median(calls[name]) for name in ("alone", "beside"))
    for direction in DIRECTIONS:
        first, *later = alone.steps[direction]
        times |= {f"{direction}_ms": first, f"slash_{direction}_ms": statistics.mean(later)}
        pairs = zip(beside.steps[direction][:-1], alone.steps[direction][:-1], strict=True)
        times[f"beside_{direction}_ms"] = statistics.mean(with_it - without for with_it, without in pairs)
        times[f"empty_{direction}_ms"] = _median_ms(dry_run.empty_step(direction), stopwatch)
    for name, num_bytes in (("exchange_ms", dry_run.key_bytes), ("small_exchange_ms", SMALL_BYTES)):
        times[name] = _median_ms(_exchange(parallel, num_bytes), stopwatch)
    slash, vertical = rank_pairs(index.to("cpu"), layer.layout)
    times["slash_pairs"] = float(slash[parallel.rank, parallel.rank])
    times["vertical_pairs"] = float(vertical[parallel.rank])
    mean = torch.tensor(list(times.values()), dtype=torch.float64, device=parallel.device)
    dist.all_reduce(mean)
    named = dict(zip(times, (mean / parallel.world_size).tolist(), strict=True))
    for direction in DIRECTIONS:  # where a transfer takes nothing, its difference is noise
        named[f"beside_{direction}_ms"] = max(named[f"beside_{direction}_ms"], 0.0)
    return Calibration(**named, exchange_bytes=dry_run.key_bytes, sm_mhz=alone.sm_mhz)


def _exchange(parallel: ParallelState, num_bytes: int) -> Callable[[], Tensor]:
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=parallel.device)
    ring = parallel.transports("flat").inner
    return lambda: ring.exchange(sent).wait()


def _median_ms(body: Callable[[], object], stopwatch: Stopwatch) -> float:
    return statistics.median(_times(body, stopwatch))


def _times(body: Callable[[], object], stopwatch: Stopwatch) -> Iterator[float]:
    body()
    for _ in range(REPEATS):
        stopwatch.begin()
        first = stopwatch.mark()
        body()
        second = stopwatch.mark()
        stopwatch.settle()
        yield stopwatch.ms(first, second)


def _tflops(flops: float, ms: float) -> float:
    """Return useful TFLOP/s; a time below the clock's grain counts as a microsecond."""
    return max(flops, 1.0) / max(ms, 1e-3) / 1e9
