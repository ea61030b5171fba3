"""Time of each phase of a layer's step on the host, and on the GPU where the host is ahead.

Host: from a call to its return, while the GPU's queue is not full. Freely: between marks around the phase, steps
launched one after the other as in training. GPU: between the same marks, all of it launched while the GPU was busy, so
that the GPU waits for transfers only. Where the host is ahead anyway that is the time as it runs: for the other
measurement the GPU rests, and at its power limit starts at higher clocks than it sustains (up to 8 % of a step).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...console import text_table
from ...transport.exposure import ExposureClock
from ..stopwatch import Mark, Stopwatch

PHASES = ("selection", "forward", "backward")
REPEATS = 5
STEPS_AHEAD = 3
"""Steps that a host launches without a full queue. The first finds cold caches and is not counted."""

AHEAD = 1.3
"""Multiple of the host's own time for which the GPU has to be busy, so that the host is ahead of it."""


class Phased(Protocol):
    """A layer's step in parts."""

    def select(self) -> None:
        """Select the keys of each head."""
        ...

    def attend(self) -> None:
        """Run the forward."""
        ...

    def differentiate(self) -> None:
        """Run the backward."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Milliseconds of one phase on one rank, medians."""

    host_ms: float
    """Time of launching it."""

    gpu_ms: float
    """Time with everything launched ahead, waits included."""

    exposed_ms: float
    """Part of the GPU's time in which computation stands still for communication."""

    free_ms: float
    """Time as it runs."""

    @property
    def idle_share(self) -> float:
        """Share of ``free_ms`` in which the GPU waits for the host."""
        return max(0.0, 1.0 - self.gpu_ms / self.free_ms)

    @property
    def slower(self) -> str:
        """The slower of host and GPU."""
        return "host" if self.host_ms > self.gpu_ms else "GPU"


def measure_phases(layer: Phased, stopwatch: Stopwatch) -> dict[str, Phase]:
    """Measure phases by name, ``step`` last, of a layer that has warmed up. A collective over all ranks of the job."""
    calls = (layer.select, layer.attend, layer.differentiate)
    host = _medians([step for _ in range(REPEATS) for step in _host_ms(calls, stopwatch)])
    lead_ms = AHEAD * sum(host)
    samples = [_gpu_ms(calls, stopwatch, lead_ms) for _ in range(REPEATS)]
    gpu, exposed = (_medians([sample[part] for sample in samples]) for part in (0, 1))
    free = _medians(list(_free_ms(calls, stopwatch)))
    if lead_ms < sum(free):
        gpu = free
    columns = [[*column, sum(column)] for column in (host, gpu, exposed, free)]
    names = ("host_ms", "gpu_ms", "exposed_ms", "free_ms")
    rows = zip(*columns, strict=True)
    return {
        phase: Phase(**dict(zip(names, row, strict=True))) for phase, row in zip((*PHASES, "step"), rows, strict=True)
    }


def table(phases: dict[str, Phase]) -> list[str]:
    """Return the lines of the table."""
    rows = []
    for name, phase in phases.items():
        numbers = [f"{ms:.3f}" for ms in (phase.host_ms, phase.gpu_ms, phase.exposed_ms, phase.free_ms)]
        rows.append([name, *numbers, f"{100 * phase.idle_share:.1f}%", phase.slower])
    return text_table(("", "host ms", "GPU ms", "exposed", "freely", "idle", "slower"), rows, indent="  ")


def _host_ms(calls: Sequence[Callable[[], None]], stopwatch: Stopwatch) -> list[list[float]]:
    """Return milliseconds of each call, of the second and each further of a few steps."""
    stopwatch.begin()
    steps = []
    for _ in range(STEPS_AHEAD):
        marks = [time.perf_counter()]
        for call in calls:
            call()
            marks.append(time.perf_counter())
        steps.append([1e3 * (after - before) for before, after in zip(marks, marks[1:], strict=False)])
    stopwatch.settle()
    return steps[1:]


def _gpu_ms(
    calls: Sequence[Callable[[], None]], stopwatch: Stopwatch, lead_ms: float
) -> tuple[list[float], list[float]]:
    """Return milliseconds of each call, and of its waits. The last call, the longest, has a lead of its own."""
    marks: list[tuple[Mark, Mark]] = []
    clocks = [ExposureClock() for _ in calls]
    for call, clock in zip(calls, clocks, strict=True):
        if call in (calls[0], calls[-1]):
            stopwatch.settle()
            stopwatch.begin(lead_ms=lead_ms)
        clock.start()
        before = stopwatch.mark()
        call()
        marks.append((before, stopwatch.mark()))
        clock.stop()
    stopwatch.settle()
    return [stopwatch.ms(*pair) for pair in marks], [clock.take_ms() for clock in clocks]


def _free_ms(calls: Sequence[Callable[[], None]], stopwatch: Stopwatch) -> Iterator[list[float]]:
    """Yield milliseconds of each call in consecutive steps, without the first, which nothing was ahead of."""
    stopwatch.begin()
    marks = [stopwatch.mark()]
    for _ in range(1 + REPEATS):
        for call in calls:
            call()
            marks.append(stopwatch.mark())
    stopwatch.settle()
    times = [stopwatch.ms(before, after) for before, after in zip(marks, marks[1:], strict=False)]
    for first in range(len(calls), len(times), len(calls)):
        yield times[first : first + len(calls)]


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]
