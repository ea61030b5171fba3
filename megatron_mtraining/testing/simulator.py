"""Simulator of a job: every rank is a thread of this process, so that tests run multi-rank code on one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ..transport.threads import PeerStoppedError, ThreadHub, ThreadTransport

_REPORT_S = 5.0
"""Seconds that ranks have after the deadline to report what they waited for."""


class RankSimulator:
    """Runner of one function on every rank of a simulated job.

    Autograd runs the backward of CPU tensors in the thread that calls it, so autograd functions that communicate work
    as they do in processes of their own.

    Args:
        world_size: number of ranks, each of which is a thread.
        timeout: seconds within which a run must end; ranks that still wait for another one then raise.
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout = timeout

    def run(self, function: Callable[[ThreadTransport], Any]) -> list[Any]:
        """Call ``function(group)`` on every rank and return what the ranks returned, in rank order.

        Raises:
            BaseException: the first error of any rank, with a note that names it. Ranks that only waited for a rank
                which had failed are passed over.
            TimeoutError: a rank has not ended in time; the others' threads are daemons and do not keep the process.
        """
        hub = ThreadHub(self.world_size, timeout=self.timeout)
        results: list[Any] = [None] * self.world_size
        errors: list[tuple[int, BaseException]] = []

        def body(rank: int) -> None:
            try:
                results[rank] = function(hub.world(rank))
                hub.stop(rank, "has returned")
            except BaseException as error:
                errors.append((rank, error))
                hub.stop(rank, f"stopped with {type(error).__name__}: {error}")

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        _run_with_one_torch_thread_each(threads, deadline=time.monotonic() + self.timeout + _REPORT_S)
        _raise_first(errors)
        running = [thread.name for thread in threads if thread.is_alive()]
        if running:
            raise TimeoutError(f"{', '.join(running)} did not end within {self.timeout:g} s.")
        return results


def _run_with_one_torch_thread_each(threads: list[threading.Thread], *, deadline: float) -> None:
    """Start and join ``threads``; many ranks share few cores, where torch's own threads would only queue up."""
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        torch.set_num_threads(num_torch_threads)


def _raise_first(errors: list[tuple[int, BaseException]]) -> None:
    own = [entry for entry in errors if not isinstance(entry[1], PeerStoppedError)]
    for rank, error in own or errors:
        error.add_note(f"raised on rank {rank}")
        raise error
