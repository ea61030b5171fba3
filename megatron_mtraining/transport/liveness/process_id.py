"""Processes of a job as others on the same host see them: do they still run?"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, told apart from a later one that is given the same number."""

    host: str
    """Name of its host."""

    pid: int
    """Its number there."""

    started: str
    """When it started, in the kernel's own count; empty where the kernel does not say."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """A process of this host."""
        return cls(socket.gethostname(), pid, _state_and_start(pid)[1])

    def is_visible(self) -> bool:
        """Whether :meth:`has_ended` can be asked here: the process runs on this host, in the same process table."""
        return self.host == socket.gethostname() and self.started != "" and not self.has_ended()

    def has_ended(self) -> bool:
        """Whether a process that was visible here has ended since; a zombie has."""
        state, started = _state_and_start(self.pid)
        return state in ("", "Z", "X") or started != self.started


def _state_and_start(pid: int) -> tuple[str, str]:
    """Fields 3 and 22 of ``/proc/<pid>/stat``; empty where there is none."""
    try:
        # The second field is a command name in parentheses, which may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
