"""The monitoring thread of a rank: find a rank that died, and print its name on every other one.

A killed rank leaves the others waiting in a collective, and NCCL's error after its timeout names no rank. Therefore a
thread of every rank checks once a second whether the processes of its own host still run. It prints a death and writes
it to the job's store, where the threads of the other hosts read it. A lost host is found by the host before it, from
the heartbeats that ranks write to the store. A rank that has learnt of a death ends a few seconds later, whatever its
main thread waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from .lost_hosts import LostHosts
from .process_id import ProcessId
from .termination import TerminationSignal

_POLL_S = 1.0
"""Seconds between checks of this host's processes and of the message in the store."""

_HEARTBEAT_S = 5.0
"""Seconds between heartbeats."""

_GRACE_S = 5.0
"""Seconds for the main thread to end with an error of its own, once a death is known."""


class HealthMonitor:
    """Monitor of the other ranks by this one.

    Args:
        store: of the job; nobody else uses this connection to it.
        members: the processes of all ranks.
        rank: this one.
        timeout_s: seconds without a heartbeat from any rank of a host after which the host counts as lost.
        training_step: returns the number of completed training steps, for the messages.
        is_over: returns whether this process has destroyed the job's process group, and may continue without it.
    """

    def __init__(
        self,
        store: dist.Store,
        members: Sequence[ProcessId],
        rank: int,
        *,
        timeout_s: float,
        training_step: Callable[[], int | None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.message: str | None = None
        self._store = store
        self._members = members
        self._rank = rank
        self._training_step = training_step
        self.is_over = is_over
        self._same_host = [other for other in range(len(members)) if other != rank and members[other].is_visible()]
        self._lost_hosts = LostHosts(store, members, rank, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._signal = TerminationSignal()
        self._thread = threading.Thread(target=self._run, name="mtraining health monitor", daemon=True)
        self._num_heartbeats = 0
        self._last_answer_s = time.monotonic()

    def start(self) -> None:
        """Start the thread; call it in the main thread."""
        self._signal.catch()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and deregister: from now on this rank and the others end without each other."""
        self._ending.set()
        self._signal.release()
        self._signal.wake()
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._signal.close()
        self._deregister()

    def release_in_child(self) -> None:
        """Restore SIGTERM in a forked child, which is not a rank."""
        self._signal.release()

    def wait_for_message(self) -> str | None:
        """Check for a few seconds, since an error of the main thread may come first; return the message, or None."""
        deadline = time.monotonic() + 3 * _POLL_S
        while self.check_now() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        return self.message

    def check_now(self) -> str | None:
        """Check the processes of this host now and return the message, or None."""
        with self._lock, contextlib.suppress(RuntimeError):
            if self.message is None:
                self._check_host()
        return self.message

    def publish(self, message: str) -> None:
        """Write the reason for which the job ends to the store; the first one stays."""
        with contextlib.suppress(RuntimeError):
            message = self._store.compare_set("message", "", message).decode()
        self.message = message

    def stop_with_error(self, reason: str) -> None:
        """Publish the error for which this rank ends, so that the others end too, and stop."""
        self._ending.set()
        self.publish(f"{self._describe([self._rank], self._training_step())} stopped with {reason}.")
        self.stop()

    def _run(self) -> None:
        self._monitor()
        self._deregister()
        while not self._ending.is_set():  # the job is over, its process is not
            if self._signal.wait(_POLL_S):
                os._exit(TerminationSignal.EXIT_CODE)

    def _monitor(self) -> None:
        next_heartbeat = time.monotonic()
        while not (self._ending.is_set() or self.is_over()):
            terminated = self._signal.wait(_POLL_S)
            heartbeat_due = time.monotonic() >= next_heartbeat
            self._check(heartbeat_due=heartbeat_due)
            if heartbeat_due:
                next_heartbeat = time.monotonic() + _HEARTBEAT_S
            if self.message is not None and not (self._ending.is_set() or self.is_over()):
                self._end(at_once=terminated)
            if terminated:
                os._exit(TerminationSignal.EXIT_CODE)

    def _deregister(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"deregistered/{self._rank}", "")

    def _check(self, *, heartbeat_due: bool) -> None:
        try:
            with self._lock:
                self._check_host()
            if heartbeat_due:
                self._send_heartbeat()
            if self.message is None and self._store.check(["message"]):
                self.message = self._store.get("message").decode()
            self._last_answer_s = time.monotonic()
        except RuntimeError as error:
            if time.monotonic() - self._last_answer_s > self._timeout_s:
                gone = [self._describe([other], None) for other in self._same_host if self._members[other].has_ended()]
                ended = f"{', '.join(gone)} ended, and the" if gone else "The"
                self.message = f"{ended} job's store no longer answers: {error}."

    def _send_heartbeat(self) -> None:
        """Send a heartbeat, and check those of the next host."""
        self._num_heartbeats += 1
        self._store.set(f"heartbeat/{self._rank}", json.dumps((self._num_heartbeats, self._training_step())))
        lost = self._lost_hosts.find()
        if lost:
            who = self._describe(lost, _last_step(self._store, lost))
            self.publish(f"{who} has not been heard from for {self._timeout_s:g} s.")

    def _check_host(self) -> None:
        """Publish the ranks of this host whose process ended without deregistering.

        Raises:
            RuntimeError: the store does not answer. It may have ended with the rank that held it, after a regular end.
        """
        gone = [other for other in self._same_host if self._members[other].has_ended()]
        deregistered = [other for other in gone if self._store.check([f"deregistered/{other}"])]
        self._same_host = [other for other in self._same_host if other not in deregistered]
        died = [other for other in gone if other not in deregistered]
        if died and self.message is None:
            self.publish(f"{self._describe(died, _last_step(self._store, died))} has died.")

    def _describe(self, ranks: Sequence[int], step: int | None) -> str:
        """Return ``rank 3 (host a, process 17, 40 training steps done)``."""
        if len(ranks) == 1:
            member = self._members[ranks[0]]
            name, where = f"rank {ranks[0]}", f"host {member.host}, process {member.pid}"
        else:
            name, where = f"each of ranks {', '.join(map(str, ranks))}", f"host {self._members[ranks[0]].host}"
        return f"{name} ({where})" if step is None else f"{name} ({where}, {step} training steps done)"

    def _end(self, *, at_once: bool) -> None:
        # Not by way of sys.stderr, whose lock the main thread may hold for ever.
        os.write(2, f"rank {self._rank}: {self.message} This rank ends too.\n".encode())
        if not at_once:
            self._ending.wait(_GRACE_S)
        if not self._ending.is_set():
            os._exit(1)


def _last_step(store: dist.Store, ranks: Sequence[int]) -> int | None:
    """Return the training step in the last heartbeat of the first of ``ranks``."""
    key = f"heartbeat/{ranks[0]}"
    with contextlib.suppress(RuntimeError):
        if store.check([key]):
            return json.loads(store.get(key))[1]
    return None
