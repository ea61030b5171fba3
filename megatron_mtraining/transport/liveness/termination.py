"""A request to terminate, heard by a thread even while the main thread is deep inside a library."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any


class TerminationSignal:
    """SIGTERM as a thread can wait for it; only where the program itself leaves SIGTERM to the system.

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
        """From now on SIGTERM wakes :meth:`wait` instead of ending the process. In the main thread only."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if previous != -1:  # an event loop's: it goes on hearing
            signal.set_wakeup_fd(previous)
            return
        signal.signal(signal.SIGTERM, _do_nothing)
        self._caught = True

    def release(self) -> None:
        """Gives SIGTERM back to the system; does nothing where it was not caught.

        A forked child must call it, or it is deaf to SIGTERM and wakes its parent instead.
        """
        if self._caught:
            self._caught = False
            signal.set_wakeup_fd(-1)
            if _is_ours():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def close(self) -> None:
        """Frees the descriptors; nobody may wait any more."""
        os.close(self._read)
        os.close(self._write)

    def wake(self) -> None:
        """Ends a :meth:`wait` that is under way."""
        os.write(self._write, b"\0")

    def wait(self, seconds: float) -> bool:
        """Whether SIGTERM came within ``seconds``, or since the last call, and is still left to this object."""
        if not select.select([self._read], [], [], seconds)[0]:
            return False
        # Other signals that the program handles wake this too.
        return signal.SIGTERM in os.read(self._read, 4096) and _is_ours()


def _is_ours() -> bool:
    """Whether nobody else has begun to handle SIGTERM since, to save a checkpoint for example."""
    return signal.getsignal(signal.SIGTERM) is _do_nothing


def _do_nothing(number: int, frame: Any) -> None: ...
