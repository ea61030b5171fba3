"""A rank that dies in training is named by every other one."""

from __future__ import annotations

from ..transport.liveness import start_rank_watch, stop_rank_watch
from .runtime import Runtime, current_runtime, is_initialized


def install(runtime: Runtime) -> None:
    """Has this rank watch over the others, and they over it; a second call changes nothing.

    A collective over all ranks of the job, called in the main thread. See
    :mod:`megatron_mtraining.transport.liveness`; a ``lost_rank_timeout_s`` of 0 installs nothing.
    """
    if runtime.config.lost_rank_timeout_s:
        start_rank_watch(silence_s=runtime.config.lost_rank_timeout_s, training_step=_training_step)


def uninstall() -> None:
    """Ends the watch; the other ranks do not miss this one."""
    stop_rank_watch()


def _training_step() -> int | None:
    return current_runtime().training_step if is_initialized() else None
