"""Milliseconds of calls that take turns: CUDA events on a GPU, the host's clock on a CPU; and a call's peak memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

Call = Callable[[], object]
"""A call. One that uses something up has a method ``prepare``, which makes it anew unless it is there, untimed."""

WARM_UP_CALLS = 3
TURN_CALLS = 5
"""Timed calls in a turn."""

SETTLE_MS = 50.0
"""Milliseconds that a call runs untimed before its turn, so that the card has the clocks of this call, not those of
the one before. A call that is longer settles them itself."""

FLUSH_BYTES = 1 << 28
"""Four times an H200's L2 and more: writing them leaves nothing of the call before in the cache."""

LONGEST_LEAD_MS = 20.0


FEWEST_CALLS = 7
"""Fewest timed calls, however long a call is."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Number and times of timed calls."""

    repeats: int
    longest_s: float | None = None
    """Seconds of timed calls after which a contender has had enough, if it has had FEWEST_CALLS."""

    rest_ms: float = 0.0
    """Milliseconds that a GPU idles before each call; a card at its power limit then starts it at full clocks."""

    def is_enough(self, samples: list[Sample]) -> bool:
        """Return whether a contender has been timed often enough."""
        is_long = self.longest_s is not None and sum(sample.ms for sample in samples) > 1e3 * self.longest_s
        return len(samples) >= self.repeats or (is_long and len(samples) >= FEWEST_CALLS)


class Sample(NamedTuple):
    """One timed call."""

    ms: float
    sm_mhz: float | None
    """Clock of the multiprocessors right after the call; None where nothing tells it."""


class Clock(Protocol):
    """Clock of single calls."""

    def settle(self, call: Call) -> None:
        """Run the call untimed for a while."""
        ...

    def sample(self, call: Call) -> Sample:
        """Time one call that finds nothing of the one before in the cache."""
        ...


class HostClock:
    """Clock for a CPU."""

    def settle(self, call: Call) -> None:
        """Do nothing: a CPU needs none; see :class:`Clock`."""

    def sample(self, call: Call) -> Sample:
        """Time one call; a CPU's caches are left as they are. See :class:`Clock`."""
        prepare(call)
        began = time.perf_counter()
        call()
        return Sample(1e3 * (time.perf_counter() - began), None)


def prepare(call: Call) -> None:
    """Prepare what a call needs anew each time; see :data:`Call`."""
    if hasattr(call, "prepare"):
        call.prepare()


class DeviceClock:
    """Clock for a GPU: events around the call, which the host has enqueued by the time the GPU comes to it.

    The flush of the L2 before each call is repeated until it lasts as long as the host needs, so that small kernels are
    not charged with the host's time. What a call makes the host wait for is still counted.

    Args:
        device: the GPU.
        rest_ms: how long it idles before each call.
    """

    def __init__(self, device: torch.device, *, rest_ms: float) -> None:
        self._device, self._rest_ms = device, rest_ms
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._host_ms: dict[Call, float] = {}
        self._last_ms: dict[Call, float] = {}
        self._flush_ms = min(self._between_events(self._flush.zero_) for _ in range(5))

    def settle(self, call: Call) -> None:
        """Settle as :class:`Clock` does; a rested card needs none."""
        if not self._rest_ms:
            if call not in self._last_ms:
                self._between_events(call)
            for _ in range(int(SETTLE_MS / self._last_ms[call])):
                self._between_events(call)

    def sample(self, call: Call) -> Sample:
        """Time one call; see :class:`Clock`."""
        prepare(call)
        lead_ms = min(LONGEST_LEAD_MS, self._host_ms.get(call, LONGEST_LEAD_MS))
        torch.cuda.synchronize(self._device)
        time.sleep(1e-3 * self._rest_ms)
        for _ in range(2 + int(lead_ms / self._flush_ms)):
            self._flush.zero_()
        return Sample(self._between_events(call), sm_mhz(self._device))

    def _between_events(self, call: Call) -> float:
        prepare(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        call()
        end.record()
        self._host_ms[call] = 1e3 * (time.perf_counter() - began)
        end.synchronize()
        self._last_ms[call] = start.elapsed_time(end)
        return self._last_ms[call]


def sm_mhz(device: torch.device) -> float | None:
    """Return the clock of a GPU's multiprocessors now; None where nothing tells it."""
    try:
        return float(torch.cuda.clock_rate(device))
    except (ImportError, RuntimeError, AttributeError):  # it asks NVML through nvidia-ml-py
        return None


def take_turns(calls: Mapping[str, Call], *, device: torch.device, timing: Timing) -> dict[str, list[Sample]]:
    """Time each call after a warm-up.

    The calls take turns, so drift meets all alike, in an order that is drawn for each round, so that none always
    follows the same other.
    """
    clock: Clock = DeviceClock(device, rest_ms=timing.rest_ms) if device.type == "cuda" else HostClock()
    for call in calls.values():
        for _ in range(WARM_UP_CALLS):
            prepare(call)
            call()
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    order, generator = list(calls), random.Random(0)
    while order := [name for name in order if not timing.is_enough(samples[name])]:
        generator.shuffle(order)
        for name in order:
            _take_turn(clock, calls[name], samples[name], timing)
    return samples


def _take_turn(clock: Clock, call: Call, samples: list[Sample], timing: Timing) -> None:
    clock.settle(call)
    for _ in range(TURN_CALLS):
        if timing.is_enough(samples):
            break
        samples.append(clock.sample(call))


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
