"""The one watch of this process: started, asked and ended."""

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

from .process_id import ProcessId
from .rank_watch import RankWatch

_STORE_TIMEOUT = timedelta(seconds=10)

_watch: RankWatch | None = None


def start_rank_watch(*, silence_s: float, training_step: Callable[[], int | None] = lambda: None) -> None:
    """Starts this process's watch; a collective over all ranks of the job, in the main thread of each.

    It lasts as long as the job's process group: a process that destroys it watches over nobody, and may start again
    with the next one.

    Args:
        silence_s: seconds without a sign of life after which a host counts as lost. A process that ended on a living
            host is noticed within a second.
        training_step: says how many training steps are done, for the messages.
    """
    global _watch
    if _watch is not None and _watch.is_over():
        stop_rank_watch()
    if _watch is not None or dist.get_world_size() == 1:
        return
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (ProcessId.of(os.getpid()), os.urandom(8).hex()))
    members = [member for member, _ in answers]
    store = dist.PrefixStore(f"mtraining_watch_{answers[0][1]}", _own_connection())
    world = weakref.ref(dist.group.WORLD)
    _watch = RankWatch(
        store,
        members,
        dist.get_rank(),
        silence_s=silence_s,
        training_step=training_step,
        is_over=lambda: not dist.is_initialized() or dist.group.WORLD is not world(),
    )
    _watch.start()
    _hook_into_process()


def stop_rank_watch() -> None:
    """Ends the watch with a goodbye; does nothing where there is none."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def news_of_a_death() -> str | None:
    """What is known of a rank that died, for an error message; None where nothing is, or nobody watches."""
    return None if _watch is None or _watch.is_over() else _watch.wait_for_news()


@functools.cache
def _hook_into_process() -> None:
    """How this process ends, and what its children do; once."""
    sys.excepthook = _telling_others(sys.excepthook)
    atexit.register(stop_rank_watch)
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    global _watch
    if _watch is not None:
        _watch.forget_in_child()
        _watch = None


def _telling_others(original: Callable[..., None]) -> Callable[..., None]:
    """An ``excepthook`` after which the other ranks know why this one ends.

    Even if its own group is over by now: an error may have passed a ``finally`` that destroyed it.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        global _watch
        watch = _watch
        concerns_others = watch is not None and not issubclass(kind, KeyboardInterrupt)
        if concerns_others and watch.wait_for_news() is None:
            reason = f"{kind.__name__}: {error}".strip().splitlines()[0].rstrip(".: ")
            _watch = None
            watch.leave_with(reason)
        original(kind, error, trace)

    return hook


def _own_connection() -> dist.Store:
    """A connection to the job's store that no wait of the main thread blocks."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    return dist.FileStore(store.path) if isinstance(store, dist.FileStore) else store
