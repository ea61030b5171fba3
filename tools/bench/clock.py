"""Milliseconds of calls that take turns: CUDA events on a GPU, the host's clock on a CPU; and a call's peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

Call = Callable[[], object]

WARM_UP_CALLS = 3
FLUSH_BYTES = 1 << 28
"""Four times an H200's L2 and more: writing them leaves nothing of the call before in the cache."""

LONGEST_LEAD_MS = 20.0


class Clock(Protocol):
    """Times single calls."""

    def sample(self, call: Call) -> float:
        """Milliseconds of one call that finds nothing of the one before in the cache."""
        ...


class HostClock:
    """For a CPU."""

    def sample(self, call: Call) -> float:
        """See :class:`Clock`; a CPU's caches are left as they are."""
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)


class DeviceClock:
    """For a GPU: events around the call, which the host has finished enqueueing by the time the GPU comes to it.

    The flush of the L2 before each call is repeated until it lasts as long as the host needs, so that small kernels are
    not charged with the host's time. What a call makes the host wait for is still counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._host_ms: dict[Call, float] = {}
        self._flush_ms = min(self._between_events(self._flush.zero_) for _ in range(5))

    def sample(self, call: Call) -> float:
        """See :class:`Clock`."""
        lead_ms = min(LONGEST_LEAD_MS, self._host_ms.get(call, LONGEST_LEAD_MS))
        torch.cuda.synchronize(self._device)
        for _ in range(2 + int(lead_ms / self._flush_ms)):
            self._flush.zero_()
        return self._between_events(call)

    def _between_events(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        call()
        end.record()
        self._host_ms[call] = 1e3 * (time.perf_counter() - began)
        end.synchronize()
        return start.elapsed_time(end)


def take_turns(calls: Mapping[str, Call], *, device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of ``repeats`` runs of each call after a warm-up; the calls take turns, so drift meets all alike."""
    clock: Clock = DeviceClock(device) if device.type == "cuda" else HostClock()
    for call in calls.values():
        for _ in range(WARM_UP_CALLS):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(clock.sample(call))
    return samples


def extra_bytes(call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]], device: torch.device) -> int | None:
    """Most bytes that a call holds at one time beyond what was there before and what it returns; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    tensors = results if isinstance(results, tuple) else (results,)
    returned = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return torch.cuda.max_memory_allocated(device) - before - returned
