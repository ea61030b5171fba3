"""Observation of attention calls: what each layer was given and which keys it selected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..metrics import AttentionCall

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
    return bool(_observers) and torch._C._current_autograd_node() is None


@torch.no_grad()
def report(call: AttentionCall) -> None:
    """Hand a call to every observer."""
    for observer in _observers:
        observer(call)
