"""Measurement of a case: every baseline is checked, then those that are right are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.metrics import causal_pairs, computed_pairs
from megatron_mtraining.metrics.density import backward_flops, forward_flops
from megatron_mtraining.types import VerticalSlashIndex

from .check import Standard, check_forward, check_gradients
from .clock import Sample, Timing, extra_bytes, interleaved
from .problem import Inputs, Problem
from .registry import Baseline, Bound
from .routines import Routine, packing_routines, selection_routines
from .selection_steps import step_samples

OPERATIONS = ("forward", "backward", "selection", "packing")


@dataclass(kw_only=True)
class Row:
    """One baseline's numbers for one operation; None for one that does not apply."""

    baseline: str
    is_dense: bool = False
    is_ours: bool = False
    ms: float
    """Median time."""

    fastest_ms: float
    slowest_ms: float
    repeats: int
    """Number of timed calls."""

    sm_mhz: float | None = None
    """Median clock of the multiprocessors: a card at its power limit lowers it."""

    tflops: float | None = None
    """Useful TFLOP/s: of the computed pairs, all causal ones for a dense baseline."""

    density: float | None = None
    """Share of the causal pairs that is computed."""

    efficiency: float | None = None
    """Time of the fastest dense baseline of this operation, times ``density``, over the time."""

    issued_per_useful: float | None = None
    extra_mib: float | None = None
    """Peak memory beyond inputs, outputs and gradients."""

    step_mib: float | None = None
    """Peak memory of a forward and the backward that follows it, with all that is saved in between."""

    share_of_forward: float | None = None
    """Time over that of this package's fastest sparse forward."""


@dataclass(kw_only=True)
class Case:
    """Results of one index."""

    label: str
    density: float
    distances: float
    """Mean number of slash distances of a head."""

    verticals: float
    rows: dict[str, list[Row]] = field(default_factory=dict)
    """Rows by operation."""

    absent: dict[str, str] = field(default_factory=dict)
    """Reasons why baselines could not take part here."""

    failed: dict[str, str] = field(default_factory=dict)
    """Faults of baselines' results; they have no speed."""


def measure_case(
    problem: Problem,
    label: str,
    inputs: Inputs,
    index: VerticalSlashIndex,
    *,
    operations: tuple[str, ...],
    baselines: list[Baseline],
    config: MTrainingConfig,
    timing: Timing,
) -> Case:
    """Measure everything about one index: who is absent, who is wrong, and the numbers of the others."""
    standard = Standard(problem, inputs, index)
    heads_per_list = problem.num_heads // index.num_lists
    pairs = int(computed_pairs(index, seq_len=problem.seq_len).sum()) * heads_per_list
    causal = _causal_pairs(problem, index)
    case = Case(
        label=label,
        density=pairs / causal,
        distances=float(index.num_slash.float().mean()),
        verticals=float(index.num_vertical.float().mean()),
    )
    timed = [operation for operation in ("forward", "backward") if operation in operations]
    bound = dict(_admitted(case, standard, problem, baselines)) if timed else {}
    for operation in timed:
        make_call = _forward_call if operation == "forward" else partial(_BackwardCall, standard.inputs.grad_out)
        calls = {baseline: make_call(each) for baseline, each in bound.items()}
        named = {baseline.name: call for baseline, call in calls.items()}
        samples = interleaved(named, device=problem.device, timing=timing)
        case.rows[operation] = _attention_rows(operation, calls, bound, problem, pairs, causal, samples)
    for row in case.rows.get("backward", []):
        row.step_mib = _step_mib(next(bound[each] for each in bound if each.name == row.baseline), standard)
    for operation, routines in (
        ("selection", lambda: selection_routines(problem, standard, config)),
        ("packing", lambda: packing_routines(problem, standard)),
    ):
        if operation in operations:
            taking_part = routines()
            case.rows[operation] = _routine_rows(case, taking_part, problem, timing)
            timed_names = {row.baseline for row in case.rows[operation]}
            if operation == "selection" and "mtraining-kernel" in timed_names:
                case.rows["selection passes"] = _pass_rows(case, taking_part[0], problem, timing)
    return case


def _causal_pairs(problem: Problem, index: VerticalSlashIndex) -> int:
    return int(causal_pairs(index, seq_len=problem.seq_len).sum()) * problem.num_heads


def _admitted(
    case: Case, standard: Standard, problem: Problem, baselines: list[Baseline]
) -> Iterator[tuple[Baseline, Bound]]:
    """Yield those who can run and are right. Whoever raises is refused with its error: peers raise what they like."""
    standards = {False: standard, True: Standard(problem, standard.inputs, None)}
    for baseline in baselines:
        unavailable = baseline.unavailable(problem)
        if unavailable is not None:
            case.absent[baseline.name] = unavailable
            continue
        own = standards[baseline.is_dense]
        try:
            check_gradients(baseline, own)
            bound = baseline.bind(problem, own.inputs, own.index)
            check_forward(bound, own)
        except Exception as error:
            case.failed[baseline.name] = _reason(error)
            continue
        yield baseline, bound


def _reason(error: Exception) -> str:
    """Return the first line of what was raised, and its type unless it is a check's own sentence."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def _forward_call(bound: Bound) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return bound.attend(*bound.leaves)

    return call


class _BackwardCall:
    """Call of the backward alone: over and over the same forward, where the baseline retains its graph."""

    def __init__(self, grad_out: Tensor, bound: Bound) -> None:
        self._grad_out, self._bound = grad_out, bound
        self._leaves = [tensor.detach().requires_grad_() for tensor in bound.leaves]
        self._out: Tensor | None = None

    def prepare(self) -> None:
        """Run a forward for the next call, unless there is one."""
        if self._out is None:
            self._out = self._bound.attend(*self._leaves)

    def __call__(self) -> tuple[Tensor, ...]:
        retains_graph = self._bound.retains_graph
        gradients = torch.autograd.grad(self._out, self._leaves, self._grad_out, retain_graph=retains_graph)
        if not retains_graph:
            self._out = None
        return gradients


def _attention_rows(
    operation: str,
    calls: dict[Baseline, Callable[[], Tensor | tuple[Tensor, ...]]],
    bound: dict[Baseline, Bound],
    problem: Problem,
    pairs: int,
    causal: int,
    samples: dict[str, list[Sample]],
) -> list[Row]:
    flops = forward_flops if operation == "forward" else backward_flops
    rows = []
    for baseline, call in calls.items():
        own_pairs = causal if baseline.is_dense else pairs
        row = _row(baseline.name, samples[baseline.name], extra_bytes(call, problem.device))
        row.is_dense, row.is_ours = baseline.is_dense, baseline.is_ours
        row.tflops = flops(own_pairs, head_dim=problem.head_dim) / row.ms / 1e9
        row.density = own_pairs / causal
        if operation == "forward" and bound[baseline].issued_pairs is not None:
            row.issued_per_useful = bound[baseline].issued_pairs / own_pairs
        rows.append(row)
    fastest_dense_ms = min((row.ms for row in rows if row.is_dense), default=None)
    for row in rows:
        if fastest_dense_ms is not None and not row.is_dense:
            row.efficiency = fastest_dense_ms * row.density / row.ms
    return rows


def _step_mib(bound: Bound, standard: Standard) -> float | None:
    def step() -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in bound.leaves]
        out = bound.attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, standard.inputs.grad_out)

    extra = extra_bytes(step, standard.inputs.query.device)
    return None if extra is None else extra / 2**20


def _routine_rows(case: Case, routines: list[Routine], problem: Problem, timing: Timing) -> list[Row]:
    right = []
    for routine in routines:
        try:
            routine.check()
        except Exception as error:
            case.failed[f"{routine.operation} {routine.name}"] = _reason(error)
            continue
        right.append(routine)
    calls = {routine.name: routine.run for routine in right}
    samples = interleaved(calls, device=problem.device, timing=timing)
    rows = [_row(each.name, samples[each.name], extra_bytes(each.run, problem.device)) for each in right]
    _add_share_of_forward(case, rows)
    return rows


def _pass_rows(case: Case, selection: Routine, problem: Problem, timing: Timing) -> list[Row]:
    """Return the passes of the selection by the kernels, in the order in which they run."""
    samples = step_samples(selection.run, device=problem.device, repeats=timing.repeats)
    rows = [_row(name, own, None) for name, own in samples.items()]
    _add_share_of_forward(case, rows)
    return rows


def _add_share_of_forward(case: Case, rows: list[Row]) -> None:
    forward_ms = min((row.ms for row in case.rows.get("forward", []) if row.is_ours), default=None)
    for row in rows:
        row.share_of_forward = None if forward_ms is None else row.ms / forward_ms


def _row(name: str, samples: list[Sample], extra: int | None) -> Row:
    times = [sample.ms for sample in samples]
    clocks = [sample.sm_mhz for sample in samples if sample.sm_mhz is not None]
    return Row(
        baseline=name,
        ms=statistics.median(times),
        fastest_ms=min(times),
        slowest_ms=max(times),
        repeats=len(times),
        sm_mhz=statistics.median(clocks) if clocks else None,
        extra_mib=None if extra is None else extra / 2**20,
    )
