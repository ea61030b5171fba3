"""Work of the attention layers of all ranks in an interval of training steps, gathered at its end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from ..config import LOCAL_PATTERNS, MTrainingConfig
from ..metrics import (
    PairCounter,
    RingWork,
    attention_recall,
    computed_pairs_of_lists,
    held_out_rows,
    model_flops,
    pairs_by_owner,
    ring_work,
    work_of_pairs,
)
from ..ring import ring_schedule
from ..tensors import to_device
from ..transport import as_transport
from ..transport.exposure import ExposureClock, unexposed
from ..transport.process_group import gather_numbers
from .recorder import LayerRecord
from .runtime import Runtime, current_runtime

RECALL_ROWS = 8
"""Rows that recall is measured on: with 8 of them each layer reads its keys once more, in one step of an interval."""


@dataclass(frozen=True, slots=True)
class IntervalFigures:
    """Figures of the whole job over an interval. None where there was nothing to measure."""

    kept_flops: float
    """Model FLOPs of the attention that was computed, forward and backward, of all layers, heads and sequences."""

    causal_flops: float
    """The same if every document had attended densely."""

    whole_flops: float
    """The same if every row of every batch had been one document."""

    density: tuple[float, float, float]
    """Kept over causal pairs of heads: mean over calls, least and most over layers."""

    layers: tuple[int, ...]
    """The layers whose work was looked at closely: one of each pipeline stage."""

    recall: float | None
    """Share of dense attention on kept keys, on rows that no estimator looks at: mean over layers and heads."""

    worst_layer: tuple[float, int] | None
    """The least recall of a layer, its mean over the heads of a tensor-parallel rank, and the layer's number."""

    worst_head: tuple[float, int, int] | None
    """The least recall of a head, the layer's number, and the head's, counted from 0."""

    worker_imbalance: float | None
    """Slow-down by the busiest rank; see :class:`megatron_mtraining.metrics.RingWork`. The worst of the layers."""

    step_imbalance: float | None
    """Slow-down by the busiest rank of each ring step."""

    exposed_ms: tuple[float, float]
    """Time that computation waited for the ring in the interval's last step: mean and most over ranks."""


@dataclass(slots=True)
class _Sample:
    """The one call of an interval that is looked at closely."""

    layer: int
    call: LayerRecord


class AttentionMeter:
    """Counter of every call that trains; an interval's last step measures each layer's recall and one layer's work.

    Nothing in a step waits for the device. A call counts when gradients are recorded: once with recomputation as
    without, and not in evaluation.
    """

    def __init__(self) -> None:
        self._pairs = PairCounter()
        self._clock = ExposureClock()
        self._sample: _Sample | None = None
        self._recalls: dict[int, Tensor | None] = {}
        self._turn = 0
        self._in_sample = False

    def begin_sample(self) -> None:
        """Mark the next step as the interval's last one."""
        self._sample, self._recalls, self._in_sample = None, {}, True
        self._clock.take_ms()
        self._clock.start()

    def observe(self, layer_number: int, call: LayerRecord) -> None:
        """Take a call of a layer; see :class:`megatron_mtraining.megatron.recorder.AttentionObserver`."""
        if not torch.is_grad_enabled():
            return
        self._count(layer_number, call)
        if self._in_sample and layer_number not in self._recalls:
            self._recalls[layer_number] = self._recall(call)
        if self._in_sample and self._sample is None and layer_number == self._layer_in_turn():
            # Queries and keys end with the call: kept on, they would be the largest tensors of the step.
            self._sample = _Sample(layer_number, dataclasses.replace(call, query=None, key=None))

    def _count(self, layer_number: int, call: LayerRecord) -> None:
        num_heads, head_dim = call.query.shape[2:]
        text = {"cu_seqlens": call.cu_seqlens, "num_valid": call.num_valid}
        given = {"seq_len": call.layout.seq_len, "head_dim": head_dim, **text}
        if call.index.is_global:
            self._pairs.add(layer_number, call.index, num_heads=num_heads, **given)
            return
        rank = current_runtime().cp_group.rank()
        kept = computed_pairs_of_lists(call.index, call.layout, cp_rank=rank, **text)
        self._pairs.add_counted(layer_number, kept.repeat_interleave(num_heads // call.index.num_lists, 1), **given)

    def figures(self) -> IntervalFigures | None:
        """Return the interval so far; None where no layer called. A collective over all ranks of the job."""
        self._clock.stop()
        runtime = current_runtime()
        with unexposed():
            of_sample = (*self._recall_figures(runtime), *self._sample_figures(runtime))
            row = (*self._pair_figures(runtime), *of_sample, self._clock.take_ms())
            table = gather_numbers(row)
        return _reduced(table)

    def end_interval(self) -> None:
        """Start the next interval, and the next layer's turn."""
        self._pairs.clear()
        self._sample, self._recalls, self._in_sample = None, {}, False
        self._turn += 1

    def stop(self) -> None:
        """Stop measuring."""
        self._clock.stop()

    def _layer_in_turn(self) -> int:
        layers = self._pairs.layers()
        return layers[self._turn % len(layers)]

    def _recall(self, call: LayerRecord) -> Tensor | None:
        """Return recall ``[num_heads]``, the mean over rows; None where no row is held out."""
        config = current_runtime().config
        rows = _rows(config, call)
        if not rows:
            return None
        with unexposed():
            recall = attention_recall(
                call.query,
                call.key,
                call.index,
                rows=rows,
                softmax_scale=call.softmax_scale,
                layout=call.layout,
                groups=current_runtime().cp_group,
                cu_seqlens=call.cu_seqlens,
            )
        by_row = recall.transpose(1, 2)[_is_text(call, rows)]
        return by_row.flatten(0, -2).mean(0)

    def _pair_figures(self, runtime: Runtime) -> tuple[float, ...]:
        """Return FLOPs kept, causal and whole; density summed, counted, least, most. Once per context-parallel group.

        Its ranks share the index, or add up what each has counted, so that only the first has something to say.
        """
        counts_apart = runtime.config.pattern in LOCAL_PATTERNS and runtime.cp_group.size() > 1
        over_ranks = as_transport(runtime.cp_group).all_reduce if counts_apart else None
        layers = self._pairs.totals(over_ranks=over_ranks).values()
        if not layers or runtime.cp_group.rank() != 0:
            return 0.0, 0.0, 0.0, 0.0, 0.0, math.inf, -math.inf
        kept, causal, whole = 0, 0, 0
        for layer in layers:
            num_heads = len(layer.computed)
            kept += model_flops(int(layer.computed.sum()), head_dim=layer.head_dim)
            causal += model_flops(num_heads * layer.causal, head_dim=layer.head_dim)
            whole += model_flops(num_heads * layer.whole, head_dim=layer.head_dim)
        density = torch.cat([layer.density for layer in layers])
        calls = torch.cat([torch.full_like(layer.density, layer.calls) for layer in layers])
        figures = (kept, causal, whole, (density * calls).sum(), calls.sum(), density.min(), density.max())
        return tuple(float(figure) for figure in figures)

    def _recall_figures(self, runtime: Runtime) -> tuple[float, ...]:
        """Return recall summed over layers, counted; a layer's least, and the layer; a head's, its layer and number.

        Once for each context-parallel group, whose ranks all have the same; NaN where there is none.
        """
        heads = {layer: recall.double().cpu() for layer, recall in self._recalls.items() if recall is not None}
        if not heads or runtime.cp_group.rank() != 0:
            return 0.0, 0.0, math.nan, math.nan, math.nan, math.nan, math.nan
        means = {layer: float(recall.mean()) for layer, recall in heads.items()}
        layer = min(means, key=means.__getitem__)
        worst = min(heads, key=lambda number: float(heads[number].min()))
        first_head = parallel_state.get_tensor_model_parallel_rank() * len(heads[worst])
        head = first_head + int(heads[worst].argmin())
        return sum(means.values()), len(means), means[layer], layer, float(heads[worst].min()), worst, head

    def _sample_figures(self, runtime: Runtime) -> tuple[float, ...]:
        """Return layer, worker imbalance and step imbalance; NaN where there is none."""
        nothing = math.nan
        if self._sample is None:
            return nothing, nothing, nothing
        work = _ring_work(self._sample.call, runtime)
        if runtime.cp_group.rank() != 0:
            return nothing, nothing, nothing
        if work is None:
            return self._sample.layer, nothing, nothing
        return self._sample.layer, work.worker_imbalance, work.step_imbalance


def _ring_work(call: LayerRecord, runtime: Runtime) -> RingWork | None:
    """Return the work of all ranks, on the first of the group; a collective puts block lists of all ranks together."""
    if runtime.cp_group.size() == 1:
        return None
    rank = runtime.cp_group.rank()
    if not call.index.is_global:
        own = pairs_by_owner(call.index, call.layout, cp_rank=rank, cu_seqlens=call.cu_seqlens)
        pairs = as_transport(runtime.cp_group).all_gather(own)
        return work_of_pairs(pairs, pairs.new_zeros(len(pairs)), _source_ranks(runtime))
    if rank != 0:
        return None
    return ring_work(call.index, call.layout, _source_ranks(runtime), cu_seqlens=call.cu_seqlens)


def _source_ranks(runtime: Runtime) -> list[tuple[tuple[int, ...], ...]]:
    cp_size = runtime.cp_group.size()
    schedules = (
        ring_schedule(runtime.config.schedule, cp_rank=rank, cp_size=cp_size, inner_size=runtime.inner_size)
        for rank in range(cp_size)
    )
    return [schedule.source_ranks for schedule in schedules]


def _rows(config: MTrainingConfig, call: LayerRecord) -> tuple[int, ...]:
    if call.cu_seqlens is None and call.num_valid is None:
        return _rows_of_whole(config, call.layout.seq_len)
    text = {"cu_seqlens": call.cu_seqlens, "num_valid": call.num_valid}
    return held_out_rows(config, seq_len=call.layout.seq_len, count=RECALL_ROWS, **text)


def _is_text(call: LayerRecord, rows: tuple[int, ...]) -> Any:
    """Return the index of ``[batch, rows, ...]`` for the rows that are text in their batch row."""
    if call.num_valid is None or call.cu_seqlens is not None:
        return slice(None)
    is_text = torch.tensor(rows, device="cpu") < call.num_valid.unsqueeze(-1)
    row, place = to_device(is_text.nonzero(), call.query.device).unbind(1)
    return row, place


@lru_cache(maxsize=16)
def _rows_of_whole(config: MTrainingConfig, seq_len: int) -> tuple[int, ...]:
    return held_out_rows(config, seq_len=seq_len, count=RECALL_ROWS)


def _reduced(table: Tensor) -> IntervalFigures | None:
    """Reduce ``[ranks, 18]``, the columns of which :meth:`AttentionMeter.figures` puts together."""
    kept, causal, whole, density_sum, count, least, most = table.T[:7]
    recall_sum, recalls, *worst, layer, worker, step, exposed = table.T[7:]
    if not count.sum():
        return None
    return IntervalFigures(
        kept_flops=float(kept.sum()),
        causal_flops=float(causal.sum()),
        whole_flops=float(whole.sum()),
        density=(float(density_sum.sum() / count.sum()), float(least.min()), float(most.max())),
        layers=tuple(sorted({int(number) for number in layer[~layer.isnan()]})),
        recall=float(recall_sum.sum() / recalls.sum()) if recalls.sum() else None,
        worst_layer=_least(*worst[:2]),
        worst_head=_least(*worst[2:]),
        worker_imbalance=_over_ranks(worker, torch.max),
        step_imbalance=_over_ranks(step, torch.max),
        exposed_ms=(float(exposed.mean()), float(exposed.max())),
    )


def _least(values: Tensor, *numbers: Tensor) -> tuple | None:
    """Return the least of ``values`` that were measured, and the numbers beside it."""
    if values.isnan().all():
        return None
    rank = int(values.nan_to_num(nan=math.inf).argmin())
    return float(values[rank]), *(int(number[rank]) for number in numbers)


def _over_ranks(column: Tensor, reduction: Callable[[Tensor], Tensor]) -> float | None:
    measured = column[~column.isnan()]
    return float(reduction(measured)) if len(measured) else None
