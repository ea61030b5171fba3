"""Kept pairs of all attention calls of many training steps, layer by layer, without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import to_device
from ..types import VerticalSlashIndex
from .density import computed_pairs_of_spans, row_spans, spans_of, triangle

_CALLS_AT_ONCE = 64
"""Calls whose indices are counted together: some fifty small launches are then one for each call."""

_ENTRIES_AT_ONCE = 2**20
"""Entries of their lists at which fewer are: each becomes half a dozen numbers of 8 bytes, and dense lists are long."""


@dataclass(slots=True)
class LayerPairs:
    """Pairs of all calls of one layer."""

    computed: Tensor
    """int64 ``[num_heads]``, on the CPU: computed pairs of each head."""

    causal: int
    """Pairs of dense causal attention, inside each document, of its text."""

    whole: int
    """Pairs of dense causal attention if every batch row were one document."""

    head_dim: int
    """Elements in a query."""

    calls: int
    """Number of calls; more than the other layers' where one number is a decoder layer's and a prediction layer's."""

    @property
    def density(self) -> Tensor:
        """float64 ``[num_heads]``: computed over causal pairs; 0 where all was padding."""
        return self.computed.double() / max(1, self.causal)


class _Kind(NamedTuple):
    """Common properties of calls that are counted together."""

    seq_len: int
    spans: tuple[tuple[int, int], ...]
    num_heads: int
    num_lists: int
    vertical_width: int
    slash_width: int
    block_size: int


class PairCounter:
    """Counter of pairs over calls. Holds at most the indices of the last few dozen: some megabytes."""

    def __init__(self) -> None:
        self._host: dict[int, LayerPairs] = {}
        self._computed: dict[int, Tensor] = {}
        self._computed_here: dict[int, Tensor] = {}
        self._uncounted: dict[_Kind, list[tuple[int, VerticalSlashIndex]]] = {}
        self._entries = 0

    def add(
        self,
        layer: int,
        index: VerticalSlashIndex,
        *,
        seq_len: int,
        num_heads: int,
        head_dim: int,
        cu_seqlens: Tensor | None = None,
        num_valid: Tensor | None = None,
    ) -> None:
        """Take a call of ``layer``; the host does not wait.

        Args:
            layer: its number.
            index: of each head, or each group of heads.
            seq_len: tokens in the global sequence.
            num_heads: query heads.
            head_dim: elements in a query.
            cu_seqlens: int32 ``[documents + 1]`` on the CPU, for packed documents.
            num_valid: on the CPU, as selection takes it: the pairs of padding do not count.
        """
        spans = row_spans(index, seq_len=seq_len, cu_seqlens=cu_seqlens, num_valid=num_valid)
        self._add_dense(layer, spans, triangle(seq_len) * (index.rows if cu_seqlens is None else 1), head_dim)
        widths = (index.vertical.shape[2], index.slash.shape[2])
        kind = _Kind(seq_len, spans, num_heads, index.num_lists, *widths, index.block_size)
        self._uncounted.setdefault(kind, []).append((layer, index))
        self._entries += sum(widths) * index.rows * index.num_lists
        if sum(map(len, self._uncounted.values())) >= _CALLS_AT_ONCE or self._entries >= _ENTRIES_AT_ONCE:
            self._count()

    def add_counted(
        self,
        layer: int,
        computed: Tensor,
        *,
        seq_len: int,
        head_dim: int,
        cu_seqlens: Tensor | None = None,
        num_valid: Tensor | None = None,
    ) -> None:
        """Take a call as :meth:`add` does, of which each rank has counted its own queries.

        ``computed``, int64 ``[batch, num_heads]``, are the computed pairs of each head on this rank.
        """
        spans = spans_of(len(computed), seq_len=seq_len, cu_seqlens=cu_seqlens, num_valid=num_valid)
        self._add_dense(layer, spans, triangle(seq_len) * len(computed), head_dim)
        self._computed_here[layer] = self._computed_here.get(layer, 0) + computed.sum(0)

    def layers(self) -> list[int]:
        """Return the numbers of the layers that called, ascending."""
        return sorted(self._host)

    def totals(self, *, over_ranks: Callable[[Tensor], Tensor] | None = None) -> dict[int, LayerPairs]:
        """Return what has been added since the last :meth:`clear`. The host waits for the device.

        Args:
            over_ranks: adds up what each rank counted of its own, once for each layer, in order; None on one rank.
        """
        self._count()
        for layer in self.layers():
            computed, here = self._computed.get(layer), self._computed_here.get(layer)
            if over_ranks is not None:
                here = over_ranks(torch.zeros_like(computed) if here is None else here.clone())
            self._host[layer].computed = sum(each for each in (computed, here) if each is not None).cpu()
        return dict(self._host)

    def clear(self) -> None:
        """Start anew."""
        self._host, self._computed, self._computed_here, self._uncounted, self._entries = {}, {}, {}, {}, 0

    def _add_dense(self, layer: int, spans: Sequence[tuple[int, int]], whole: int, head_dim: int) -> None:
        pairs = self._host.setdefault(layer, LayerPairs(torch.empty(0, device="cpu"), 0, 0, head_dim, 0))
        pairs.calls += 1
        pairs.causal += sum(int(triangle(stop - start)) for start, stop in spans)
        pairs.whole += whole

    def _count(self) -> None:
        for kind, calls in self._uncounted.items():
            layers, indices = zip(*calls, strict=True)
            computed = computed_pairs_of_spans(
                VerticalSlashIndex.concatenate(indices), kind.spans * len(calls), seq_len=kind.seq_len
            )
            per_list = computed.unflatten(0, (len(calls), -1)).sum(1)
            per_call = per_list.repeat_interleave(kind.num_heads // kind.num_lists, 1)
            numbers = sorted(set(layers))
            rows = torch.tensor([numbers.index(layer) for layer in layers], device="cpu")
            sums = per_call.new_zeros(len(numbers), per_call.shape[1])
            sums.index_add_(0, to_device(rows, computed.device), per_call)
            for layer, of_layer in zip(numbers, sums, strict=True):
                self._computed[layer] = self._computed[layer] + of_layer if layer in self._computed else of_layer
        self._uncounted, self._entries = {}, 0
