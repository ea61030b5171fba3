"""Keeps what the attention layers last did, while somebody asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..layout import SequenceLayout
from ..types import AttentionIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One attention call of one layer, as seen by this rank."""

    index: AttentionIndex
    """What each of this rank's query heads kept; the same on every context-parallel rank, unless it is block lists."""

    layout: SequenceLayout
    """Where the sequence lives."""

    softmax_scale: float
    """Scale of the scores."""

    cu_seqlens: Tensor | None
    """int32 ``[documents + 1]`` of a packed call, on the CPU."""

    num_valid: Tensor | None = None
    """int32 ``[batch]`` or ``[documents]``, on the CPU: tokens of each before its padding; None where there is none."""

    query: Tensor | None = None
    """``[batch, local_len, num_heads, head_dim]``, detached, when capture was asked for."""

    key: Tensor | None = None
    """``[batch, local_len, num_kv_heads, head_dim]``, detached, when capture was asked for."""


@dataclass(slots=True, kw_only=True)
class AttentionRecorder:
    """The last call of each layer since recording began; outside of a recording nothing is kept."""

    capture_query_key: bool = False
    """Whether to keep queries and keys too, which recall is computed from."""

    layers: dict[int, LayerRecord] = field(default_factory=dict)
    """By layer number, counted from 1 as Megatron does."""


class AttentionObserver(Protocol):
    """Looks on at every attention call of this process."""

    def observe(self, layer_number: int, call: LayerRecord) -> None:
        """Takes a call, with queries and keys, before its attention is computed."""
        ...


_observer: AttentionObserver | None = None


def set_observer(observer: AttentionObserver | None) -> None:
    """Has ``observer`` look on from now on instead of whoever did; None ends it."""
    global _observer
    _observer = observer


def current_observer() -> AttentionObserver | None:
    """Who looks on at present."""
    return _observer
