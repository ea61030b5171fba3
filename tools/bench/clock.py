"""Milliseconds of interleaved calls: CUDA events on a GPU, the host's clock on a CPU; and a call's peak memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_mtraining.commands.stopwatch import Stopwatch

Call = Callable[[], object]
"""A call. One that uses something up has a method ``prepare``, which makes it anew unless it is there, untimed."""

WARM_UP_CALLS = 3
BATCH_CALLS = 5
"""Calls timed one after the other before the next baseline's."""

SETTLE_MS = 50.0
"""Milliseconds that a call runs untimed before it is timed, so that the card has the clocks of this call, not those of
the one before. A call that is longer settles them itself."""

LONGEST_LEAD_MS = 20.0

FEWEST_CALLS = 7
"""Fewest timed calls, however long a call is."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Number and times of timed calls."""

    repeats: int
    longest_s: float | None = None
    """Seconds of timed calls after which a baseline is timed no more, once FEWEST_CALLS were."""

    rest_ms: float = 0.0
    """Milliseconds that a GPU idles before each call; a card at its power limit then starts it at full clocks."""

    def is_enough(self, samples: list[Sample]) -> bool:
        """Return whether a baseline has been timed often enough."""
        is_long = self.longest_s is not None and sum(sample.ms for sample in samples) > 1e3 * self.longest_s
        return len(samples) >= self.repeats or (is_long and len(samples) >= FEWEST_CALLS)


class Sample(NamedTuple):
    """One timed call."""

    ms: float
    sm_mhz: float | None
    """Clock of the multiprocessors right after the call; None where nothing reports it."""


def prepare(call: Call) -> None:
    """Prepare what a call needs anew each time; see :data:`Call`."""
    if hasattr(call, "prepare"):
        call.prepare()


class CallClock:
    """Clock of single calls. The host has enqueued a call by the time the GPU comes to it.

    The flush of the L2 before each call is repeated until it lasts as long as the host needs, so that small kernels are
    not charged with the host's time. What a call makes the host wait for is still counted. On a CPU a call is timed as
    it is.

    Args:
        device: of the tensors.
        rest_ms: how long a GPU idles before each call.
    """

    def __init__(self, device: torch.device, *, rest_ms: float) -> None:
        self._stopwatch, self._rest_ms = Stopwatch(device), rest_ms
        self._host_ms: dict[Call, float] = {}
        self._last_ms: dict[Call, float] = {}
        self._flush_ms = min(self._between_marks(self._stopwatch.flush) for _ in range(5))

    def settle(self, call: Call) -> None:
        """Run the call untimed for a while; a rested card and a CPU need none."""
        if self._stopwatch.on_gpu and not self._rest_ms:
            if call not in self._last_ms:
                self._between_marks(call)
            for _ in range(int(SETTLE_MS / self._last_ms[call])):
                self._between_marks(call)

    def sample(self, call: Call) -> Sample:
        """Time one call that finds nothing of the one before in a GPU's cache."""
        prepare(call)
        if self._stopwatch.on_gpu:
            lead_ms = min(LONGEST_LEAD_MS, self._host_ms.get(call, LONGEST_LEAD_MS))
            self._stopwatch.settle()
            time.sleep(1e-3 * self._rest_ms)
            self._stopwatch.flush(2 + int(lead_ms / self._flush_ms))
        return Sample(self._between_marks(call), self._stopwatch.sm_mhz())

    def _between_marks(self, call: Call) -> float:
        prepare(call)
        began = time.perf_counter()
        start = self._stopwatch.mark()
        call()
        end = self._stopwatch.mark()
        self._host_ms[call] = 1e3 * (time.perf_counter() - began)
        self._stopwatch.settle()
        self._last_ms[call] = self._stopwatch.ms(start, end)
        return self._last_ms[call]


def interleaved(calls: Mapping[str, Call], *, device: torch.device, timing: Timing) -> dict[str, list[Sample]]:
    """Time each call after a warm-up.

    The calls are interleaved, so that drift is the same for all, in an order that is drawn anew each time, so that none
    always follows the same other.
    """
    clock = CallClock(device, rest_ms=timing.rest_ms)
    for call in calls.values():
        for _ in range(WARM_UP_CALLS):
            prepare(call)
            call()
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    order, generator = list(calls), random.Random(0)
    while order := [name for name in order if not timing.is_enough(samples[name])]:
        generator.shuffle(order)
        for name in order:
            clock.settle(calls[name])
            for _ in range(BATCH_CALLS):
                if not timing.is_enough(samples[name]):
                    samples[name].append(clock.sample(calls[name]))
    return samples


def extra_bytes(call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]], device: torch.device) -> int | None:
    """Return the most bytes that a call holds at once beyond those before and its result; None on a CPU."""
    if device.type != "cuda":
        return None
    prepare(call)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    tensors = results if isinstance(results, tuple) else (results,)
    return torch.cuda.max_memory_allocated(device) - before - storage_bytes(tensors)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count bytes behind ``tensors``: those of a storage that several of them are views of, such as dK and dV, once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
