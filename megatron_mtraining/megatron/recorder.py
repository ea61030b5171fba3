"""Recorder of the attention layers' last calls, while somebody asks for it."""

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
    """Index that each of this rank's query heads kept; the same on every context-parallel rank, save block lists."""

    layout: SequenceLayout
    """Layout of the sequence."""

    softmax_scale: float
    """Scale of the scores."""

    cu_seqlens: Tensor | None
    """Bounds of the documents of a packed call, int32 ``[documents + 1]``, on the CPU."""

    num_valid: Tensor | None = None
    """Tokens of each row or document before its padding, int32 ``[batch]`` or ``[documents]``, on the CPU, or None."""

    query: Tensor | None = None
    """Query ``[batch, local_len, num_heads, head_dim]``, detached, when capture was asked for."""

    key: Tensor | None = None
    """Key ``[batch, local_len, num_kv_heads, head_dim]``, detached, when capture was asked for."""


@dataclass(slots=True, kw_only=True)
class AttentionRecorder:
    """The last call of each layer since recording began; outside of a recording nothing is kept."""

    capture_query_key: bool = False
    """True if queries and keys are kept too, which recall is computed from."""

    layers: dict[int, LayerRecord] = field(default_factory=dict)
    """Records by layer number, counted from 1 as Megatron does."""


class AttentionObserver(Protocol):
    """Observer of every attention call of this process."""

    def observe(self, layer_number: int, call: LayerRecord) -> None:
        """Take a call, with queries and keys, before its attention is computed."""
        ...


_observer: AttentionObserver | None = None


def set_observer(observer: AttentionObserver | None) -> None:
    """Have ``observer`` observe from now on instead of the previous one; None ends it."""
    global _observer
    _observer = observer


def current_observer() -> AttentionObserver | None:
    """Return the present observer."""
    return _observer
