"""Time for which computation waits for communication, measured around every wait while a clock runs.

On a GPU an event before and one after each wait lie on the stream that computes: between them nothing but the wait
passes there. The host reads them once they have happened and never waits. On a CPU the host waits.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

_MOST_UNREAD = 256
"""Pairs of events in flight above which those that have happened are read, so that their number stays bounded."""


class ExposureClock:
    """Sum of the waits of this process between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self._unread: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._unused: list[torch.cuda.Event] = []
        self._sum_ms = 0.0

    def start(self) -> None:
        """Count every wait from now on here, and only here."""
        global _running
        _running = self

    def stop(self) -> None:
        """Stop counting waits; do nothing where another clock runs."""
        global _running
        if _running is self:
            _running = None

    def take_ms(self) -> float:
        """Return the milliseconds waited since the last call. The host waits for what has not happened yet."""
        if self._unread:
            self._unread[-1][1].synchronize()
        self._read_happened()
        taken, self._sum_ms = self._sum_ms, 0.0
        return taken

    @contextlib.contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Measure a wait of the current stream of ``device``, or of the host."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._sum_ms += (time.perf_counter() - start) * 1000.0
            return
        stream = torch.cuda.current_stream(device)
        before, after = self._event(), self._event()
        before.record(stream)
        yield
        after.record(stream)
        self._unread.append((before, after))
        if len(self._unread) > _MOST_UNREAD:
            self._read_happened()

    def _event(self) -> torch.cuda.Event:
        return self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)

    def _read_happened(self) -> None:
        while self._unread and self._unread[0][1].query():
            before, after = self._unread.popleft()
            self._sum_ms += before.elapsed_time(after)
            self._unused += (before, after)


_running: ExposureClock | None = None
_NOTHING = contextlib.nullcontext()


def exposed(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Count the wait inside the ``with`` block where a clock runs; else cost nothing."""
    return _NOTHING if _running is None else _running.waiting(device)


@contextlib.contextmanager
def unexposed() -> Iterator[None]:
    """Leave out waits inside the ``with`` block: they are the measurement's own and count nowhere."""
    global _running
    paused, _running = _running, None
    try:
        yield
    finally:
        _running = paused
