"""Points in time on a GPU's stream or a CPU's clock, and a backend whose steps are timed one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mtraining.backends.protocol import AttentionBackend

from ..clock import sm_mhz

LEAD_BYTES, LEAD_CALLS = 1 << 28, 96
"""Writes that keep a GPU busy for some 5 ms, until the host is ahead of it by a selection's launches."""

CYCLES_OF_MS = 2_000_000
"""Cycles in a millisecond of the multiprocessors' clock, which is at most this fast."""

Mark = Any
"""An event, or seconds."""


DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """One call on one rank, forward and then backward; milliseconds by direction."""

    steps: dict[str, list[float]]
    """Time of computing in each step."""

    whole: dict[str, float]
    """Time with everything between the steps."""

    sm_mhz: float | None
    """Clock of the multiprocessors right after it."""

    @classmethod
    def median(cls, calls: Sequence[CallTimes]) -> CallTimes:
        """Return the median of every number by itself."""
        clocks = [call.sm_mhz for call in calls if call.sm_mhz is not None]
        return cls(
            steps={
                name: [median(step) for step in zip(*(call.steps[name] for call in calls), strict=True)]
                for name in DIRECTIONS
            },
            whole={name: median(call.whole[name] for call in calls) for name in DIRECTIONS},
            sm_mhz=median(clocks) if clocks else None,
        )


class Stopwatch:
    """Marks of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._lead = torch.empty(LEAD_BYTES, dtype=torch.uint8, device=device) if self._on_gpu else None

    def begin(self, *, lead_ms: float = 0.0) -> None:
        """Bring all ranks together; what follows is not charged with the host's time.

        Args:
            lead_ms: for how much longer at least a GPU waits, until the host is ahead of it by more.
        """
        if self._lead is None:
            dist.barrier()
            return
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        for _ in range(LEAD_CALLS):
            self._lead.zero_()
        if lead_ms:
            torch.cuda._sleep(round(lead_ms * CYCLES_OF_MS))
            dist.all_reduce(self._lead[:1])  # clocks differ, and with them how long each of them has slept

    def mark(self) -> Mark:
        """Mark the present, on the stream that computes."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until everything marked has happened."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def ms(self, first: Mark, second: Mark) -> float:
        """Return milliseconds between two marks, after :meth:`settle`."""
        return first.elapsed_time(second) if self._on_gpu else 1e3 * (second - first)

    def time_call(
        self,
        backend: AttentionBackend,
        forward: Callable[[StepClock], Any],
        backward: Callable[[StepClock, Any], object],
    ) -> CallTimes:
        """Time a forward and a backward on a backend, whole and step by step.

        Args:
            backend: what computes the steps.
            forward: given the backend to use.
            backward: given that and what ``forward`` returned.
        """
        clock = StepClock(backend, self)
        self.begin()
        marks = [self.mark()]
        result = forward(clock)
        marks.append(self.mark())
        backward(clock, result)
        marks.append(self.mark())
        steps = clock.take_ms()
        whole = [self.ms(*marks[:2]), self.ms(*marks[1:])]
        mhz = sm_mhz(self._device) if self._on_gpu else None
        return CallTimes(steps=steps, whole=dict(zip(DIRECTIONS, whole, strict=True)), sm_mhz=mhz)


class StepClock:
    """A backend that marks the beginning and the end of what it computes in each ring step.

    Packing, gathering and exchanges are the ring's and not in between, nor what it does with gradients of keys before
    those of queries are made.
    """

    def __init__(self, backend: AttentionBackend, stopwatch: Stopwatch) -> None:
        self._backend, self._stopwatch = backend, stopwatch
        self._marks: dict[str, list[list[Mark]]] = {"forward": [], "backward": []}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute and mark; see :class:`AttentionBackend`, and so below."""
        return self._timed("forward", self._backend.forward, *args, **options)

    def backward(self, *args: Any, **options: Any) -> Any:
        return self._timed("backward", self._backend.backward, *args, **options)

    def take_ms(self) -> dict[str, list[float]]:
        """Return milliseconds of each step since the last call of this method, by direction. Wait for them."""
        self._stopwatch.settle()
        taken, self._marks = self._marks, {"forward": [], "backward": []}
        return {name: [self._computing_ms(marks) for marks in steps] for name, steps in taken.items()}

    def _computing_ms(self, marks: list[Mark]) -> float:
        """Return milliseconds from every first mark to every second."""
        return sum(self._stopwatch.ms(*pair) for pair in zip(marks[::2], marks[1::2], strict=True))

    def _timed(self, direction: str, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        marks = [self._stopwatch.mark()]
        send = options.get("on_kv_gradients")

        def paused(*grads: Tensor) -> None:
            marks.append(self._stopwatch.mark())
            send(*grads)
            marks.append(self._stopwatch.mark())

        if send is not None:
            options["on_kv_gradients"] = paused
        result = operation(*args, **options)
        self._marks[direction].append([*marks, self._stopwatch.mark()])
        return result
