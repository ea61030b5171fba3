"""Imbalance of every selection on a model's layers: pairs by rank and step, counted, of lists of any pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention import select
from ...config import MTrainingConfig
from ...console import text_table
from ...layout import SequenceLayout
from ...metrics import AttentionCall, RingWork, computed_pairs_of_lists, rank_lists, rank_pairs, work_of_pairs
from ...ring import RingShape
from ...types import AttentionIndex, VerticalSlashIndex

HEADINGS = (
    *("selection", "layout", "schedule", "density %", "worker", "worst", "layer", "max/min"),
    *("lockstep", "worst", "layer", "worst step", "worst head"),
)

LEGEND = """\
worker: busiest rank / mean rank of a layer's pairs, mean over layers; its worst layer. max/min: busiest / idlest rank,
worst layer. lockstep: the busiest rank of every step, added up / mean rank, mean over layers; its worst layer. worst
step: busiest / mean rank of a step, of all layers. worst head: worker imbalance of one head alone. Pairs are counted,
of the lists as they were selected, at the length of the text; dense has what the layout's blocks alone cost there."""


class LayerBalance(NamedTuple):
    """Imbalances of one layer under one layout and schedule."""

    layer: int
    density: float
    worker: float
    worker_max_over_min: float
    lockstep: float
    worst_step: float
    worst_head: float


class Setting(NamedTuple):
    """Key of a row of the table."""

    cp_size: int
    selection: str
    layout: str
    schedule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReplayer:
    """Receiver of attention calls that selects keys for each in several ways and counts pairs of ranks and steps."""

    configs: Mapping[str, MTrainingConfig]
    """Selections by name."""

    layers: Sequence[int] | None
    """Numbers of the layers that count; None for all."""

    worlds: Sequence[int]
    layouts: Sequence[str]
    schedules: Sequence[str]
    node_size: int
    balances: dict[Setting, list[LayerBalance]] = field(default_factory=lambda: defaultdict(list))

    def take(self, call: AttentionCall) -> None:
        """Select and count.

        Raises:
            ValueError: the sequence or the ranks do not divide as a layout or schedule needs.
        """
        if self.layers and call.layer not in self.layers:
            return
        seq_len = call.query.shape[1]
        layouts = [
            SequenceLayout(kind, seq_len=seq_len, cp_size=cp_size, node_size=min(self.node_size, cp_size))
            for cp_size in self.worlds
            for kind in self.layouts
        ]
        shapes = {cp_size: self._shapes(cp_size) for cp_size in self.worlds}
        for name, config in self.configs.items():
            index = select(call.query, call.key, config, softmax_scale=call.softmax_scale, cu_seqlens=call.cu_seqlens)
            density = float(replace(call, index=index).density.mean())
            for layout in layouts:
                of_heads = head_pairs(index, layout, cu_seqlens=call.cu_seqlens).double()
                worst_head = float((of_heads.amax(0) / of_heads.mean(0)).max())
                pairs = rank_pairs(index, layout, cu_seqlens=call.cu_seqlens)
                for ring in shapes[layout.cp_size]:
                    work = work_of_pairs(*pairs, ring.source_ranks())
                    setting = Setting(layout.cp_size, name, layout.kind, ring.kind)
                    self.balances[setting].append(_balance(call.layer, density, work, worst_head))

    def lines(self) -> Iterator[str]:
        """Yield a table for each number of ranks."""
        for cp_size in self.worlds:
            in_node = min(self.node_size, cp_size)
            num_layers = len(next(iter(self.balances.values())))
            yield f"\nW {cp_size}: nodes of {in_node}, {cp_size // in_node} of them; layers: {num_layers}"
            rows = [_cells(setting, each) for setting, each in self.balances.items() if setting.cp_size == cp_size]
            yield from text_table(HEADINGS, rows)

    def numbers(self) -> list[dict[str, object]]:
        """Return everything that was counted, for a file."""
        return [
            {**setting._asdict(), "layers": [balance._asdict() for balance in balances]}
            for setting, balances in self.balances.items()
        ]

    def _shapes(self, cp_size: int) -> list[RingShape]:
        return [RingShape(kind=kind, cp_size=cp_size, node_size=self.node_size) for kind in self.schedules]


def head_pairs(index: AttentionIndex, layout: SequenceLayout, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """int64 ``[cp_size, num_lists]``: pairs of each rank's queries by list, over the rows of an index of all blocks."""
    if not isinstance(index, VerticalSlashIndex):
        of_ranks = (rank_lists(index, layout, cp_rank=rank) for rank in range(layout.cp_size))
        return torch.stack(
            [
                computed_pairs_of_lists(lists, layout, cp_rank=rank, cu_seqlens=cu_seqlens).sum(0)
                for rank, lists in enumerate(of_ranks)
            ]
        )
    heads = [
        index.rebuild(*(tensor[:, head : head + 1] for tensor in index.tensors)) for head in range(index.num_lists)
    ]
    counted = [rank_pairs(head, layout, cu_seqlens=cu_seqlens) for head in heads]
    return torch.stack([slash.sum(1) + vertical for slash, vertical in counted], dim=1)


def _balance(layer: int, density: float, work: RingWork, worst_head: float) -> LayerBalance:
    total = work.stages.sum(1)
    return LayerBalance(
        layer=layer,
        density=density,
        worker=work.worker_imbalance,
        worker_max_over_min=float(total.max() / total.min()),
        lockstep=work.step_imbalance,
        worst_step=float(work.imbalance_of_steps.max()),
        worst_head=worst_head,
    )


def _cells(setting: Setting, balances: Sequence[LayerBalance]) -> list[str]:
    def mean(name: str) -> float:
        return sum(getattr(each, name) for each in balances) / len(balances)

    worker, lockstep = (max(balances, key=lambda each: getattr(each, name)) for name in ("worker", "lockstep"))
    return [
        *(setting.selection, setting.layout, setting.schedule, f"{100 * mean('density'):.2f}"),
        *(f"{mean('worker'):.3f}", f"{worker.worker:.3f}", f"{worker.layer}"),
        f"{max(each.worker_max_over_min for each in balances):.2f}",
        *(f"{mean('lockstep'):.3f}", f"{lockstep.lockstep:.3f}", f"{lockstep.layer}"),
        f"{max(each.worst_step for each in balances):.2f}",
        f"{max(each.worst_head for each in balances):.3f}",
    ]
