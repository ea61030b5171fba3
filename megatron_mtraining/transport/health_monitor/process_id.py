"""Identity of a process of the job, and its state as other processes of the same host read it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, distinct from a later one with the same number."""

    host: str
    """Host name."""

    pid: int
    """Process number on that host."""

    started: str
    """Start time in kernel ticks; empty where ``/proc`` has none."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the process ``pid`` of this host."""
        return cls(socket.gethostname(), pid, _state_and_start(pid)[1])

    def is_visible(self) -> bool:
        """Return True if :meth:`has_ended` works here: the process runs on this host, in the same process table."""
        return self.host == socket.gethostname() and self.started != "" and not self.has_ended()

    def has_ended(self) -> bool:
        """Return True if a process that was visible here has ended since; a zombie has."""
        state, started = _state_and_start(self.pid)
        return state in ("", "Z", "X") or started != self.started


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return fields 3 and 22 of ``/proc/<pid>/stat``; empty where there is no such process."""
    try:
        # The second field is a command name in parentheses, which may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
