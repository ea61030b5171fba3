"""The honest meter: beside Megatron's own throughput, which counts dense attention, that of the computed work.

:func:`install` hooks the training loop of ``megatron.training``. At Megatron's log interval one line follows Megatron's
own, and the same figures go to TensorBoard and Weights & Biases where Megatron writes there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .attention_meter import AttentionMeter, IntervalFigures
from .compat import require_symbol
from .patching import Patches
from .recorder import set_observer

_TRAINING = "megatron.training.training"
_USED = ("get_args", "get_timers", "print_rank_last", "get_tensorboard_writer", "get_wandb_writer")


def install() -> None:
    """Meter the training loop of this process; a second call changes nothing. Every rank of the job calls it.

    Raises:
        MissingSymbolError: this Megatron's training loop lacks something that is hooked; the message names it.
    """
    if _installed:
        return
    for name in _USED:
        require_symbol(_TRAINING, name)
    loop = _MeteredLoop(AttentionMeter())
    _patches.wrap(_TRAINING, "num_floating_point_operations", loop.count_flops, parameters=("args", "batch_size"))
    _patches.wrap(_TRAINING, "training_log", loop.log, parameters=("iteration", "is_first_iteration"))
    loop.meter.begin_sample()
    set_observer(loop.meter)
    _installed.append(loop.meter)


def uninstall() -> None:
    """Give Megatron its own functions back; do nothing where the meter is not installed."""
    _patches.undo()
    set_observer(None)
    while _installed:
        _installed.pop().stop()


_patches = Patches()
_installed: list[AttentionMeter] = []


@dataclass(frozen=True, slots=True)
class Throughput:
    """Model FLOPs a second and GPU, in TFLOP/s, over an interval."""

    executed: float
    """Throughput of what was computed."""

    dense: float
    """Throughput of what dense attention would have taken: Megatron's own figure."""


class _MeteredLoop:
    """Wrappers around Megatron's functions."""

    def __init__(self, meter: AttentionMeter) -> None:
        self.meter = meter
        self._steps = 0
        self._dense_flops = 0.0
        self._flops_know_documents = False

    def count_flops(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``num_floating_point_operations`` and keep what it says of a step."""
        flops = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self._flops_know_documents = given.get("seqlen_squared_sum_in_batch") is not None
        self._dense_flops = float(flops)
        return flops

    def log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``training_log``, as every step does, and add a line where Megatron logs one."""
        from megatron.training import training

        call = inspect.signature(original).bind(*args, **kwargs).arguments
        iteration, is_first = call["iteration"], call.get("is_first_iteration", False)
        interval = training.get_args().log_interval
        self._steps += 1
        ends_interval = iteration % interval == 0
        if not (ends_interval or is_first):
            result = original(*args, **kwargs)
        else:
            seconds = training.get_timers()("interval-time").elapsed(reset=False, barrier=True)
            result = original(*args, **kwargs)
            self._report(training, iteration, seconds / self._steps, writes=not is_first)
        if ends_interval and not is_first:  # Megatron goes on counting after its first line, so this does
            self.meter.end_interval()
            self._steps = 0
        if (iteration + 1) % interval == 0:
            self.meter.begin_sample()
        return result

    def _report(self, training: Any, iteration: int, step_seconds: float, *, writes: bool) -> None:
        figures = self.meter.figures()
        if figures is None:
            return
        throughput = self._throughput(figures, step_seconds, training.get_args().world_size)
        training.print_rank_last(report_line(iteration, throughput, figures, step_ms=step_seconds * 1000.0))
        if not writes:
            return
        scalars = report_scalars(throughput, figures)
        board, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
        if board:
            for name, value in scalars.items():
                board.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)

    def _throughput(self, figures: IntervalFigures, step_seconds: float, world_size: int) -> Throughput:
        counted = figures.causal_flops if self._flops_know_documents else figures.whole_flops
        executed = self._dense_flops - (counted - figures.kept_flops) / self._steps
        to_tera = 1.0 / (step_seconds * 1e12 * world_size)
        return Throughput(executed=executed * to_tera, dense=self._dense_flops * to_tera)


def report_line(iteration: int, throughput: Throughput, figures: IntervalFigures, *, step_ms: float) -> str:
    """Return one line in the form of Megatron's own."""
    mean, least, most = figures.density
    parts = [
        f" mtraining iteration {iteration:8d}",
        f"executed throughput per GPU (TFLOP/s/GPU): {throughput.executed:.1f}",
        f"dense-equivalent throughput per GPU (TFLOP/s/GPU): {throughput.dense:.1f}",
        f"kept density (%): {100 * mean:.2f} ({100 * least:.2f} to {100 * most:.2f})",
    ]
    if figures.recall is not None:
        (layer_recall, layer), (head_recall, *head) = figures.worst_layer, figures.worst_head
        worst = f"{layer_recall:.4f} in layer {layer}, {head_recall:.4f} in layer {head[0]} head {head[1]}"
        parts.append(f"recall: {figures.recall:.4f} (least {worst})")
    if figures.worker_imbalance is not None:
        parts.append(f"worker imbalance in layer {' '.join(map(str, figures.layers))}: {figures.worker_imbalance:.3f}")
        parts.append(f"step imbalance: {figures.step_imbalance:.3f}")
    mean_ms, most_ms = figures.exposed_ms
    share = 100 * mean_ms / step_ms
    parts.append(f"exposed communication (ms): {mean_ms:.1f} of {step_ms:.1f} ({share:.1f} %), at most {most_ms:.1f}")
    return " | ".join(parts) + " |"


def report_scalars(throughput: Throughput, figures: IntervalFigures) -> dict[str, float]:
    """Report the same to TensorBoard and Weights & Biases."""
    mean, least, most = figures.density
    scalars: dict[str, float | None] = {
        "mtraining/executed-throughput": throughput.executed,
        "mtraining/dense-equivalent-throughput": throughput.dense,
        "mtraining/density": mean,
        "mtraining/density-least": least,
        "mtraining/density-most": most,
        "mtraining/recall": figures.recall,
        "mtraining/recall-worst-layer": figures.worst_layer and figures.worst_layer[0],
        "mtraining/recall-worst-head": figures.worst_head and figures.worst_head[0],
        "mtraining/worker-imbalance": figures.worker_imbalance,
        "mtraining/step-imbalance": figures.step_imbalance,
        "mtraining/exposed-communication-ms": figures.exposed_ms[0],
        "mtraining/exposed-communication-ms-most": figures.exposed_ms[1],
    }
    return {name: value for name, value in scalars.items() if value is not None}
