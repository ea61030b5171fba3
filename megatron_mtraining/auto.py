"""The schedule of a call whose configuration leaves it to ``auto``."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from .config import MTrainingConfig
from .layout import SequenceLayout
from .transport import RingTransports


def with_schedule(
    config: MTrainingConfig, query: Tensor, key: Tensor, *, layout: SequenceLayout, transports: RingTransports
) -> MTrainingConfig:
    """Return ``config`` with the schedule that is predicted to be fastest, decided in the first such call."""
    cp = transports.cp
    sizes = cp.size, transports.inner.size, layout.seq_len, query.shape[2], key.shape[2], query.shape[3]
    return _decided(config, layout.kind, cp.global_ranks[cp.rank] == 0, *sizes)


@lru_cache(maxsize=64)
def _decided(config: MTrainingConfig, layout: str, log: bool, *sizes: int) -> MTrainingConfig:
    from .planner.auto import RingCall, decide

    names = ("cp_size", "node_size", "seq_len", "num_heads", "num_kv_heads", "head_dim")
    call = RingCall(**dict(zip(names, sizes, strict=True)))
    return replace(config, schedule=decide(config, call, layout=layout, log=log).schedule)
