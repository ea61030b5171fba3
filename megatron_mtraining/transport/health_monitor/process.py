"""The health monitor of this process: start, query, stop."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .monitor import HealthMonitor
from .process_id import ProcessId

_STORE_TIMEOUT = timedelta(seconds=10)

_monitor: HealthMonitor | None = None


def start_health_monitor(*, timeout_s: float, training_step: Callable[[], int | None] = lambda: None) -> None:
    """Start this process's monitor; a collective over all ranks of the job, in the main thread of each.

    The monitor ends with the job's process group; a process that forms another group may start another one. It takes
    SIGTERM where the program leaves SIGTERM to the system, chains ``sys.excepthook``, and ends this process with
    ``os._exit`` a few seconds after it has learnt that another rank died.

    Args:
        timeout_s: seconds without a heartbeat after which the ranks of a host count as lost. A process that ended on a
            host that still runs is noticed within a second.
        training_step: returns the number of completed training steps, for the messages.
    """
    global _monitor
    if _monitor is not None and _monitor.is_over():
        stop_health_monitor()
    if _monitor is not None or dist.get_world_size() == 1:
        return
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (ProcessId.of(os.getpid()), os.urandom(8).hex()))
    members = [member for member, _ in answers]
    store = dist.PrefixStore(f"mtraining_health_{answers[0][1]}", _own_connection())
    world = weakref.ref(dist.group.WORLD)
    _monitor = HealthMonitor(
        store,
        members,
        dist.get_rank(),
        timeout_s=timeout_s,
        training_step=training_step,
        is_over=lambda: not dist.is_initialized() or dist.group.WORLD is not world(),
    )
    _monitor.start()
    _hook_into_process()


def stop_health_monitor() -> None:
    """Stop the monitor and deregister this rank; does nothing where no monitor runs."""
    global _monitor
    if _monitor is not None:
        _monitor.stop()
        _monitor = None


def lost_rank_message() -> str | None:
    """Return the sentence on the rank that died, for an error message; None where no rank did, or no monitor runs."""
    return None if _monitor is None or _monitor.is_over() else _monitor.wait_for_message()


@functools.cache
def _hook_into_process() -> None:
    """Install the hooks for this process's end and for forked children; once."""
    sys.excepthook = _publishing(sys.excepthook)
    atexit.register(stop_health_monitor)
    os.register_at_fork(after_in_child=_release_in_child)


def _release_in_child() -> None:
    global _monitor
    if _monitor is not None:
        _monitor.release_in_child()
        _monitor = None


def _publishing(original: Callable[..., None]) -> Callable[..., None]:
    """Return an ``excepthook`` that publishes the error to the other ranks first.

    Also where this process's group is destroyed by now: an error may have passed a ``finally`` that destroyed it.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        global _monitor
        monitor = _monitor
        concerns_others = monitor is not None and not issubclass(kind, KeyboardInterrupt)
        if concerns_others and monitor.wait_for_message() is None:
            reason = f"{kind.__name__}: {error}".strip().splitlines()[0].rstrip(".: ")
            _monitor = None
            monitor.stop_with_error(reason)
        original(kind, error, trace)

    return hook


def _own_connection() -> dist.Store:
    """Return a connection to the job's store that no wait of the main thread blocks."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    return dist.FileStore(store.path) if isinstance(store, dist.FileStore) else store
