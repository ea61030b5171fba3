"""Points in time on a GPU's stream or a CPU's clock, the same on all ranks of a job."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

LEAD_BYTES, LEAD_CALLS = 1 << 28, 96
"""Writes that keep a GPU busy for some 5 ms, until the host is ahead of it by a selection's launches. They are four
times an H200's L2 and more, so nothing of earlier calls remains in the cache."""

CYCLES_OF_MS = 2_000_000
"""Cycles in a millisecond of the multiprocessors' clock, which is at most this fast."""

Mark = Any
"""An event, or seconds."""


class Stopwatch:
    """Marks of one rank; on a CPU nothing is asynchronous and nothing is flushed."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._lead = torch.empty(LEAD_BYTES, dtype=torch.uint8, device=device) if self.on_gpu else None

    def begin(self, *, lead_ms: float = 0.0) -> None:
        """Synchronize all ranks; what follows is not charged with the host's time.

        Args:
            lead_ms: for how much longer at least a GPU waits, until the host is ahead of it by more.
        """
        self.settle()
        dist.barrier()
        self.settle()
        self.flush(LEAD_CALLS)
        if lead_ms and self._lead is not None:
            torch.cuda._sleep(round(lead_ms * CYCLES_OF_MS))
            dist.all_reduce(self._lead[:1])  # clocks differ, and with them how long each of them has slept

    def flush(self, times: int = 1) -> None:
        """Overwrite a GPU's caches, and keep it busy meanwhile."""
        if self._lead is not None:
            for _ in range(times):
                self._lead.zero_()

    def mark(self) -> Mark:
        """Mark the present, on the stream that computes."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until everything marked has happened."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def ms(self, first: Mark, second: Mark) -> float:
        """Return milliseconds between two marks, after :meth:`settle`."""
        return first.elapsed_time(second) if self.on_gpu else 1e3 * (second - first)

    def sm_mhz(self) -> float | None:
        """Return the clock of a GPU's multiprocessors now; None where nothing reports it."""
        try:
            return float(torch.cuda.clock_rate(self.device)) if self.on_gpu else None
        except (ImportError, RuntimeError, AttributeError):  # it asks NVML through nvidia-ml-py
            return None
