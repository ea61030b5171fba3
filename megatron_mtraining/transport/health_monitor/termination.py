"""SIGTERM, delivered to a thread even while the main thread is inside a library call."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any


class TerminationSignal:
    """SIGTERM for a waiting thread; only where the program itself leaves SIGTERM to the system.

    Python runs signal handlers in the main thread, which may be waiting for a GPU. The byte that the interpreter
    writes to its wake-up descriptor arrives at once.
    """

    EXIT_CODE = 128 + signal.SIGTERM

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._caught = False

    def catch(self) -> None:
        """Make SIGTERM wake :meth:`wait` instead of ending the process. In the main thread only."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if previous != -1:  # an event loop's: the descriptor remains its own
            signal.set_wakeup_fd(previous)
            return
        signal.signal(signal.SIGTERM, _do_nothing)
        self._caught = True

    def release(self) -> None:
        """Restore the system's SIGTERM; does nothing where it was not caught.

        A forked child must call it, or SIGTERM wakes its parent instead of ending the child.
        """
        if self._caught:
            self._caught = False
            signal.set_wakeup_fd(-1)
            if _is_ours():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def close(self) -> None:
        """Close the descriptors; no thread may wait afterwards."""
        os.close(self._read)
        os.close(self._write)

    def wake(self) -> None:
        """Wake a thread that waits."""
        os.write(self._write, b"\0")

    def wait(self, seconds: float) -> bool:
        """Return True if SIGTERM came within ``seconds`` or since the last call, and is still handled here."""
        if not select.select([self._read], [], [], seconds)[0]:
            return False
        # Other signals that the program handles wake this too.
        return signal.SIGTERM in os.read(self._read, 4096) and _is_ours()


def _is_ours() -> bool:
    """Return False once the program handles SIGTERM itself, to save a checkpoint for example."""
    return signal.getsignal(signal.SIGTERM) is _do_nothing


def _do_nothing(number: int, frame: Any) -> None: ...
