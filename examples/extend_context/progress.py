"""A progress line on the terminal, and now and then in a log."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line for each command in progress: rewritten on a terminal, printed every ten seconds elsewhere."""

    def __init__(self, name: str, total: float | None, unit: str, *, start: float = 0.0) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, start
        self._first, self._begin, self._last = start, time.monotonic(), 0.0

    def update(self, done: float, note: str = "") -> None:
        """Report ``done`` of the total, at most ten times a second."""
        self.done = done
        now, to_terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._last < (0.1 if to_terminal else 10.0):
            return
        self._last = now
        rate = (done - self._first) / max(now - self._begin, 1e-9)
        share = f"{100 * done / self.total:5.1f} %, " if self.total else ""
        line = f"{self.name}: {share}{done:.1f} {self.unit}, {rate:.2f} {self.unit}/s{', ' + note if note else ''}"
        print(f"\r\033[K{line}" if to_terminal else line, end="" if to_terminal else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal's cursor on a new line."""
        if self._last and sys.stderr.isatty():
            print(file=sys.stderr)
