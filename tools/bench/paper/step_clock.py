"""A backend whose steps are timed one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from megatron_mtraining.backends.protocol import AttentionBackend
from megatron_mtraining.commands.stopwatch import Mark, Stopwatch

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


def time_call(
    stopwatch: Stopwatch,
    backend: AttentionBackend,
    forward: Callable[[StepClock], Any],
    backward: Callable[[StepClock, Any], object],
) -> CallTimes:
    """Time a forward and a backward on a backend, whole and step by step.

    Args:
        stopwatch: of this rank.
        backend: what computes the steps.
        forward: given the backend to use.
        backward: given that and what ``forward`` returned.
    """
    clock = StepClock(backend, stopwatch)
    stopwatch.begin()
    marks = [stopwatch.mark()]
    result = forward(clock)
    marks.append(stopwatch.mark())
    backward(clock, result)
    marks.append(stopwatch.mark())
    steps = clock.take_ms()
    whole = [stopwatch.ms(*marks[:2]), stopwatch.ms(*marks[1:])]
    return CallTimes(steps=steps, whole=dict(zip(DIRECTIONS, whole, strict=True)), sm_mhz=stopwatch.sm_mhz())


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
