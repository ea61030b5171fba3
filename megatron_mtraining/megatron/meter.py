"""Meter of a training run: beside Megatron's own throughput, which counts dense attention, that of the computed work.

:func:`install` wraps two functions of ``megatron.training``. At Megatron's log interval one line follows Megatron's
own, and the same numbers go to TensorBoard and Weights & Biases where Megatron writes there. Nothing in a step waits
for the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
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
from .compat import Patches, arguments_of, require_symbol
from .runtime import LayerRecord, Runtime, current_runtime, process

RECALL_ROWS = 8
"""Rows that recall is measured on: with 8 of them each layer reads its keys once more, in one step of an interval."""

SAMPLE_STEPS = 10
"""Least steps from one measurement of recall and work to the next, where the log interval is shorter."""

_NEARLY = 0.9
"""Share of ``max_density`` from which a layer counts as limited by it."""

_TRAINING = "megatron.training.training"
_USED = ("get_args", "get_timers", "print_rank_last", "get_tensorboard_writer", "get_wandb_writer")


def install() -> None:
    """Meter the training loop of this process; a second call changes nothing. Every rank calls it.

    Raises:
        MissingSymbolError: this Megatron's training loop lacks something that is used; the message names it.
    """
    if process().meter is not None:
        return
    for name in _USED:
        require_symbol(_TRAINING, name)
    meter = Meter()
    meter.start()
    process().meter = meter
    process().observers.append(meter)


def uninstall() -> None:
    """Restore Megatron's own functions; do nothing where the meter is not installed."""
    if process().meter is not None:
        process().meter.stop()
        process().observers.remove(process().meter)
        process().meter = None


@dataclass(frozen=True, slots=True)
class IntervalMetrics:
    """Metrics of all ranks over an interval. None where there was nothing to measure."""

    computed_flops: float
    """Model FLOPs of the attention that was computed, forward and backward, of all layers, heads and sequences."""

    causal_flops: float
    """The same if every document had attended densely."""

    whole_flops: float
    """The same if every row of every batch had been one document."""

    density: tuple[float, float, float]
    """Computed over causal pairs of heads: mean over calls, least and most over layers."""

    layers: tuple[int, ...]
    """The layers whose ring work was measured: one of each pipeline stage."""

    recall: float | None
    """Share of dense attention on selected keys, on rows that no estimator uses: mean over layers and heads."""

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


class Meter:
    """Counter of every call that trains; an interval's last step measures each layer's recall and one layer's work.

    Of intervals of a few steps not every one measures them: see :data:`SAMPLE_STEPS`.

    A call counts when gradients are recorded: once with recomputation as without, and not in evaluation.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._steps = 0
        self._dense_flops = 0.0
        self._flops_of_documents = False
        self._pairs = PairCounter()
        self._clock = ExposureClock()
        self._sample: tuple[int, LayerRecord] | None = None
        self._recalls: dict[int, Tensor | None] = {}
        self._layers: list[int] = []  # of the last interval
        self._measures = False
        self._steps_since, self._num_measured = 0, 0

    def start(self) -> None:
        """Wrap Megatron's functions, and begin with the first step."""
        wrap = self._patches.wrap
        wrap(_TRAINING, "num_floating_point_operations", self.count_flops, parameters=("args", "batch_size"))
        wrap(_TRAINING, "training_log", self._log, parameters=("iteration", "is_first_iteration"))
        self.begin_last_step(measures=True)

    def stop(self) -> None:
        """Restore Megatron's functions and stop measuring."""
        self._patches.undo()
        self._clock.stop()

    def count_flops(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``num_floating_point_operations`` and record its result of a step."""
        flops = original(*args, **kwargs)
        self._flops_of_documents = arguments_of(original, args, kwargs).get("seqlen_squared_sum_in_batch") is not None
        self._dense_flops = float(flops)
        return flops

    def _log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``training_log``, as every step does, and add a line where Megatron logs one."""
        from megatron.training import training

        call = arguments_of(original, args, kwargs)
        iteration, is_first = call["iteration"], call.get("is_first_iteration", False)
        interval = training.get_args().log_interval
        self._steps += 1
        self._steps_since = 0 if self._measures else self._steps_since + 1
        ends_interval = iteration % interval == 0
        if not (ends_interval or is_first):
            result = original(*args, **kwargs)
        else:
            seconds = training.get_timers()("interval-time").elapsed(reset=False, barrier=True)
            result = original(*args, **kwargs)
            self._report(training, iteration, seconds / self._steps, writes=not is_first)
        if ends_interval and not is_first:  # Megatron continues counting after its first line, so this does
            self._layers = self._pairs.layers()
            self._pairs.clear()
            self._num_measured += self._measures
            self._sample, self._recalls, self._measures = None, {}, False
            self._steps = 0
        if (iteration + 1) % interval == 0:
            self.begin_last_step(measures=max(interval, self._steps_since + 1) >= SAMPLE_STEPS)
        return result

    def _report(self, training: Any, iteration: int, step_seconds: float, *, writes: bool) -> None:
        metrics = self.metrics()
        if metrics is None:
            return
        executed, dense = self.throughput(metrics, step_seconds, training.get_args().world_size)
        line = report_line(iteration, executed, dense, metrics, step_ms=step_seconds * 1000.0)
        training.print_rank_last(line + density_bound(metrics, current_runtime().config))
        if not writes:
            return
        scalars = report_scalars(executed, dense, metrics)
        board, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
        if board:
            for name, value in scalars.items():
                board.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)

    def throughput(self, metrics: IntervalMetrics, step_seconds: float, world_size: int) -> tuple[float, float]:
        """Return model TFLOP/s a GPU: of what was computed, and of dense attention, which is Megatron's own number."""
        counted = metrics.causal_flops if self._flops_of_documents else metrics.whole_flops
        executed = self._dense_flops - (counted - metrics.computed_flops) / self._steps
        to_tera = 1.0 / (step_seconds * 1e12 * world_size)
        return executed * to_tera, self._dense_flops * to_tera

    def begin_last_step(self, *, measures: bool) -> None:
        """Mark the next step as the interval's last one, and say whether it measures recall and work."""
        self._sample, self._recalls, self._measures = None, {}, measures
        self._clock.take_ms()
        self._clock.start()

    def observe(self, layer_number: int, call: LayerRecord) -> None:
        """Take a call of a layer; see :class:`megatron_mtraining.megatron.runtime.AttentionObserver`."""
        if not torch.is_grad_enabled():
            return
        self._count(layer_number, call)
        if not self._measures:
            return
        if layer_number not in self._recalls:
            self._recalls[layer_number] = self._recall(call)
        layers = self._layers or self._pairs.layers()
        if self._sample is None and layer_number == layers[self._num_measured % len(layers)]:
            # Queries and keys end with the call: retained, they would be the largest tensors of the step.
            self._sample = layer_number, dataclasses.replace(call, query=None, key=None)

    def _count(self, layer_number: int, call: LayerRecord) -> None:
        num_heads, head_dim = call.query.shape[2:]
        text = {"cu_seqlens": call.cu_seqlens, "num_valid": call.num_valid}
        given = {"seq_len": call.layout.seq_len, "head_dim": head_dim, **text}
        if call.index.is_global:
            self._pairs.add(layer_number, call.index, num_heads=num_heads, **given)
            return
        rank = current_runtime().cp_group.rank()
        computed = computed_pairs_of_lists(call.index, call.layout, cp_rank=rank, **text)
        self._pairs.add_counted(layer_number, computed.repeat_interleave(num_heads // call.index.num_lists, 1), **given)

    def _recall(self, call: LayerRecord) -> Tensor | None:
        """Return recall ``[num_heads]``, the mean over rows; None where no row is held out."""
        sizes = {"seq_len": call.layout.seq_len, "count": RECALL_ROWS}
        rows = held_out_rows(current_runtime().config, **sizes, cu_seqlens=call.cu_seqlens, num_valid=call.num_valid)
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
        return recall.transpose(1, 2)[_is_text(call, rows)].flatten(0, -2).mean(0)

    def metrics(self) -> IntervalMetrics | None:
        """Return the interval so far; None where no layer called. A collective over all ranks."""
        self._clock.stop()
        runtime = current_runtime()
        with unexposed():
            # The rank's row of the table that _reduce reads. The ranks of a context-parallel group share the index, or
            # add up what each has counted, so that only the first reports what the group has in common.
            is_first = runtime.cp_group.rank() == 0
            pairs, recall, work = self._pair_row(runtime), self._recall_row(), self._work_row(runtime)
            row = (*pairs, *recall, *work) if is_first else (*_NO_PAIRS, *_NO_RECALL, *_NO_WORK)
            table = gather_numbers((*row, self._clock.take_ms()))
        return _reduce(table)

    def _pair_row(self, runtime: Runtime) -> tuple[float, ...]:
        """Return FLOPs computed, causal and whole; density summed, counted, least, most."""
        counts_apart = runtime.config.pattern in LOCAL_PATTERNS and runtime.cp_group.size() > 1
        over_ranks = as_transport(runtime.cp_group).all_reduce if counts_apart else None
        layers = self._pairs.totals(over_ranks=over_ranks).values()
        if not layers:
            return _NO_PAIRS
        computed, causal, whole = 0, 0, 0
        for layer in layers:
            num_heads = len(layer.computed)
            computed += model_flops(int(layer.computed.sum()), head_dim=layer.head_dim)
            causal += model_flops(num_heads * layer.causal, head_dim=layer.head_dim)
            whole += model_flops(num_heads * layer.whole, head_dim=layer.head_dim)
        density = torch.cat([layer.density for layer in layers])
        calls = torch.cat([torch.full_like(layer.density, layer.calls) for layer in layers])
        row = (computed, causal, whole, (density * calls).sum(), calls.sum(), density.min(), density.max())
        return tuple(float(number) for number in row)

    def _recall_row(self) -> tuple[float, ...]:
        """Return recall summed over layers, counted; a layer's least, and the layer; a head's, its layer and number."""
        heads = {layer: recall.double().cpu() for layer, recall in self._recalls.items() if recall is not None}
        if not heads:
            return _NO_RECALL
        means = {layer: float(recall.mean()) for layer, recall in heads.items()}
        layer = min(means, key=means.__getitem__)
        worst = min(heads, key=lambda number: float(heads[number].min()))
        first_head = parallel_state.get_tensor_model_parallel_rank() * len(heads[worst])
        head = first_head + int(heads[worst].argmin())
        return sum(means.values()), len(means), means[layer], layer, float(heads[worst].min()), worst, head

    def _work_row(self, runtime: Runtime) -> tuple[float, float, float]:
        """Return layer, worker imbalance and step imbalance of the sampled call."""
        if self._sample is None:
            return _NO_WORK
        layer, call = self._sample
        work = _ring_work(call, runtime)
        return (layer, math.nan, math.nan) if work is None else (layer, work.worker_imbalance, work.step_imbalance)


_NO_PAIRS = (0.0, 0.0, 0.0, 0.0, 0.0, math.inf, -math.inf)
_NO_RECALL = (0.0, 0.0, *[math.nan] * 5)
_NO_WORK = (math.nan, math.nan, math.nan)


def _ring_work(call: LayerRecord, runtime: Runtime) -> RingWork | None:
    """Return the work of all ranks, on the first of the group; a collective puts block lists of all ranks together."""
    rank, cp_size = runtime.cp_group.rank(), runtime.cp_group.size()
    if cp_size == 1 or (call.index.is_global and rank != 0):
        return None
    kind, sizes = runtime.config.schedule, {"cp_size": cp_size, "inner_size": runtime.inner_size}
    sources = [ring_schedule(kind, cp_rank=each, **sizes).source_ranks for each in range(cp_size)]
    if call.index.is_global:
        return ring_work(call.index, call.layout, sources, cu_seqlens=call.cu_seqlens)
    own = pairs_by_owner(call.index, call.layout, cp_rank=rank, cu_seqlens=call.cu_seqlens)
    pairs = as_transport(runtime.cp_group).all_gather(own)
    return work_of_pairs(pairs, pairs.new_zeros(len(pairs)), sources)


def _is_text(call: LayerRecord, rows: tuple[int, ...]) -> Any:
    """Return the index of ``[batch, rows, ...]`` for the rows that are text in their batch row."""
    if call.num_valid is None or call.cu_seqlens is not None:
        return slice(None)
    is_text = torch.tensor(rows, device="cpu") < call.num_valid.unsqueeze(-1)
    return to_device(is_text.nonzero(), call.query.device).unbind(1)


def _reduce(table: Tensor) -> IntervalMetrics | None:
    """Reduce ``[ranks, 18]``, the rows of which :meth:`Meter.metrics` puts together."""
    computed, causal, whole, density_sum, count, least, most = table.T[:7]
    recall_sum, recalls, *worst, layer, worker, step, exposed = table.T[7:]
    if not count.sum():
        return None
    return IntervalMetrics(
        computed_flops=float(computed.sum()),
        causal_flops=float(causal.sum()),
        whole_flops=float(whole.sum()),
        density=(float(density_sum.sum() / count.sum()), float(least.min()), float(most.max())),
        layers=tuple(sorted({int(number) for number in layer[~layer.isnan()]})),
        recall=float(recall_sum.sum() / recalls.sum()) if recalls.sum() else None,
        worst_layer=_least(*worst[:2]),
        worst_head=_least(*worst[2:]),
        worker_imbalance=_most(worker),
        step_imbalance=_most(step),
        exposed_ms=(float(exposed.mean()), float(exposed.max())),
    )


def _least(values: Tensor, *numbers: Tensor) -> tuple | None:
    """Return the least of ``values`` that were measured, and the numbers beside it."""
    if values.isnan().all():
        return None
    rank = int(values.nan_to_num(nan=math.inf).argmin())
    return float(values[rank]), *(int(number[rank]) for number in numbers)


def _most(column: Tensor) -> float | None:
    measured = column[~column.isnan()]
    return float(measured.max()) if len(measured) else None


def report_line(iteration: int, executed: float, dense: float, metrics: IntervalMetrics, *, step_ms: float) -> str:
    """Return one line in the form of Megatron's own; ``executed`` and ``dense`` are :meth:`Meter.throughput`."""
    mean, least, most = metrics.density
    parts = [
        f" mtraining iteration {iteration:8d}",
        f"executed throughput per GPU (TFLOP/s/GPU): {executed:.1f}",
        f"dense-equivalent throughput per GPU (TFLOP/s/GPU): {dense:.1f}",
        f"density (%): {100 * mean:.2f} ({100 * least:.2f} to {100 * most:.2f})",
    ]
    if metrics.recall is not None:
        (layer_recall, layer), (head_recall, *head) = metrics.worst_layer, metrics.worst_head
        worst = f"{layer_recall:.4f} in layer {layer}, {head_recall:.4f} in layer {head[0]} head {head[1]}"
        parts.append(f"recall: {metrics.recall:.4f} (least {worst})")
    if metrics.worker_imbalance is not None:
        parts.append(f"worker imbalance in layer {' '.join(map(str, metrics.layers))}: {metrics.worker_imbalance:.3f}")
        parts.append(f"step imbalance: {metrics.step_imbalance:.3f}")
    mean_ms, most_ms = metrics.exposed_ms
    share = 100 * mean_ms / step_ms
    parts.append(f"exposed communication (ms): {mean_ms:.1f} of {step_ms:.1f} ({share:.1f} %), at most {most_ms:.1f}")
    return " | ".join(parts) + " |"


def density_bound(metrics: IntervalMetrics, config: MTrainingConfig) -> str:
    """Return the end of the line where ``max_density`` limits a layer, with the recall given up if it was measured.

    The bound counts keys of a column and of a distance twice, so a layer that it limits computes somewhat less.
    """
    is_bounded = config.pattern == "vertical_slash" and config.budget == "cost" and config.max_density is not None
    if not is_bounded or metrics.density[2] < _NEARLY * config.max_density:
        return ""
    binds = f" --mtraining-max-density {config.max_density:g} binds"
    if metrics.recall is None:
        return f"{binds} |"
    return f"{binds}: {max(0.0, config.target_recall - metrics.recall):.4f} below the target recall |"


def report_scalars(executed: float, dense: float, metrics: IntervalMetrics) -> dict[str, float]:
    """Return the same for TensorBoard and Weights & Biases."""
    mean, least, most = metrics.density
    scalars: dict[str, float | None] = {
        "mtraining/executed-throughput": executed,
        "mtraining/dense-equivalent-throughput": dense,
        "mtraining/density": mean,
        "mtraining/density-least": least,
        "mtraining/density-most": most,
        "mtraining/recall": metrics.recall,
        "mtraining/recall-worst-layer": metrics.worst_layer and metrics.worst_layer[0],
        "mtraining/recall-worst-head": metrics.worst_head and metrics.worst_head[0],
        "mtraining/worker-imbalance": metrics.worker_imbalance,
        "mtraining/step-imbalance": metrics.step_imbalance,
        "mtraining/exposed-communication-ms": metrics.exposed_ms[0],
        "mtraining/exposed-communication-ms-most": metrics.exposed_ms[1],
    }
    return {name: value for name, value in scalars.items() if value is not None}
