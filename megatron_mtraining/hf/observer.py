"""Observation of attention calls: what each layer was given and which keys it selected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import SequenceLayout
from ..metrics import attention_recall, density, kept_pairs_of_lists
from ..metrics.density import triangle
from ..metrics.spans import spans_of
from ..types import AttentionIndex, VerticalSlashIndex


class AttentionCall(NamedTuple):
    """One call of one layer, without gradients."""

    layer: int
    """Number of the layer, from 1."""

    query: Tensor
    """``[batch, seq, num_heads, head_dim]``, after rotary embedding."""

    key: Tensor
    """``[batch, seq, num_kv_heads, head_dim]``, likewise."""

    index: AttentionIndex | None
    """Keys that were selected; None where the layer attended densely."""

    softmax_scale: float | None

    cu_seqlens: Tensor | None
    """int32 bounds of packed documents and padding, on the CPU."""

    @property
    def density(self) -> Tensor:
        """float64 ``[num_lists]``: computed pairs as a share of the causal ones; ones where the layer is dense."""
        seq_len = self.query.shape[1]
        if self.index is None:
            return torch.ones(1, dtype=torch.float64, device=self.query.device)
        if isinstance(self.index, VerticalSlashIndex):
            return density(self.index, seq_len=seq_len, cu_seqlens=self.cu_seqlens)
        layout = SequenceLayout("striped", seq_len=seq_len, cp_size=1, block_size=self.index.block_size)
        pairs = kept_pairs_of_lists(self.index, layout, cp_rank=0, cu_seqlens=self.cu_seqlens)
        spans = spans_of(len(pairs), seq_len=seq_len, cu_seqlens=self.cu_seqlens)
        return pairs.sum(0).double() / sum(triangle(stop - start) for start, stop in spans)

    def recall(self, rows: Sequence[int]) -> Tensor:
        """``[num_heads, rows]``: share of dense attention on the selected keys, at some rows, mean over the batch."""
        if self.index is None:
            return torch.ones(self.query.shape[2], len(rows), device=self.query.device)
        return attention_recall(
            self.query,
            self.key,
            self.index,
            rows=rows,
            softmax_scale=self.softmax_scale,
            cu_seqlens=self.cu_seqlens,
        ).mean(0)


Observer = Callable[[AttentionCall], None]

_observers: list[Observer] = []


class LayerMetrics:
    """Observer of the density of each layer, and of its recall at given rows: means over the calls."""

    def __init__(self, rows: Sequence[int] = ()) -> None:
        """Measure density; and recall at ``rows``, ascending, which no estimator should have probed."""
        self._rows = tuple(rows)
        self._density: dict[int, list[Tensor]] = {}
        self._recall: dict[int, list[Tensor]] = {}

    def __call__(self, call: AttentionCall) -> None:
        """Take a call; the host does not wait for the device, but where lists of blocks are counted."""
        self._density.setdefault(call.layer, []).append(call.density.mean())
        if self._rows:
            self._recall.setdefault(call.layer, []).append(call.recall(self._rows).mean(1))

    @property
    def density(self) -> dict[int, float]:
        """Density of each layer. Waits for the device."""
        return {layer: float(torch.stack(each).mean()) for layer, each in sorted(self._density.items())}

    @property
    def recall(self) -> dict[int, Tensor]:
        """``[num_heads]`` of each layer: recall of each head."""
        return {layer: torch.stack(each).mean(0).cpu() for layer, each in sorted(self._recall.items())}


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Hand every call to ``observer``, for instance a :class:`LayerMetrics`, while the context lasts.

    A recomputation in the backward pass selects the same keys again and is not handed over.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def is_observed() -> bool:
    """True if an observer waits for calls and this is no recomputation of one."""
    return bool(_observers) and torch._C._current_graph_task_id() == -1


@torch.no_grad()
def report(call: AttentionCall) -> None:
    """Hand a call to every observer."""
    for observer in _observers:
        observer(call)
