"""Work of one rank of one number of ranks: every method at every length, checked, timed, and its steps one by one."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_mtraining.commands.stopwatch import Stopwatch
from megatron_mtraining.errors import BackendUnavailableError, RankMismatchError
from megatron_mtraining.metrics import (
    attention_recall,
    causal_pairs,
    computed_pairs,
    computed_pairs_of_lists,
    held_out_rows,
)
from megatron_mtraining.types import AttentionIndex, BlockListIndex, VerticalSlashIndex

from ..problem import Inputs, Problem
from .calibration import calibrate
from .check import check_layer
from .dry_run import DryRun
from .layer import Layer, ParallelState, RingLayer, check_runs, layer_of, whole_inputs
from .methods import METHODS, OURS, Method, chosen
from .step_clock import DIRECTIONS, CallTimes, StepClock, time_call

RESULTS = "ring.json"
ERRORS = "error{rank}.json"
EVERY_METHOD = "every method"
RECALL_ROWS = 8
CHECKED_BLOCKS = 4
"""Blocks of each rank that are checked."""

STEP_REPEATS = 5
"""Repeats of a ring's call and, by turns with it, of its two dry runs."""

TIMEOUT = timedelta(seconds=120)
"""Time after which a rank that waits for another one gives up."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Job that every rank is told."""

    problem: Problem
    """Sizes; its length is replaced by each of ``seq_lens``."""

    seq_lens: tuple[int, ...]
    methods: str
    world_size: int
    node_size: int
    repeats: int
    longest_s: float
    """Seconds of timed calls that are enough for one method at one length."""

    deadline: float
    """``time.time()`` after which nothing is begun."""

    folder: Path
    """Folder into which the first rank writes :data:`RESULTS` after each method, and the indices; and each rank, under
    :data:`ERRORS`, what it raised, as long as not all ranks know."""


def run_rank(rank: int, store: str, assignment: Assignment) -> None:
    """Run one process."""
    on_gpu = assignment.problem.device.type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    sizes = {"rank": rank, "world_size": assignment.world_size}
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{store}", timeout=TIMEOUT, **sizes)
    try:
        parallel = ParallelState.create(node_size=assignment.node_size, device=device)
        _Session(replace(assignment, problem=replace(assignment.problem, device=device)), parallel).run()
    finally:
        dist.destroy_process_group()


class _Failure(NamedTuple):
    """Reason why a rank could not do something."""

    why: str
    failed: bool
    """False where it is only not there."""

    is_heard: bool
    """True if it tells of another rank's refusal."""

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        """Return its sentence, or its kind and first line."""
        if isinstance(error, BackendUnavailableError):
            return cls(str(error), failed=False, is_heard=False)
        first_line = (str(error).splitlines() or [""])[0]
        return cls(f"{type(error).__name__}: {first_line}", failed=True, is_heard=isinstance(error, RankMismatchError))

    @staticmethod
    def said(by_rank: list[_Failure | None]) -> _Failure | None:
        """Return the refusal that tells most; with its rank where that is the only one."""
        said = [(rank, each) for rank, each in enumerate(by_rank) if each is not None]
        if not said:
            return None
        rank, first = min(said, key=lambda pair: pair[1].is_heard)
        is_alone = all(each.is_heard for other, each in said if other != rank)
        return first._replace(why=f"Rank {rank}: {first.why}") if is_alone and len(by_rank) > 1 else first


class _Session:
    """All measurements of one number of ranks."""

    def __init__(self, assignment: Assignment, parallel: ParallelState) -> None:
        self._assignment, self._parallel = assignment, parallel
        self._stopwatch = Stopwatch(parallel.device)
        self._rows: list[dict[str, Any]] = []
        self._absent: list[dict[str, Any]] = []

    def run(self) -> None:
        """Run every method at every length."""
        methods = [method for method in chosen(self._assignment.methods) if self._is_right(method)]
        for seq_len in self._assignment.seq_lens:
            self._run_length(methods, replace(self._assignment.problem, seq_len=seq_len))

    def _run_length(self, methods: list[Method], problem: Problem) -> None:
        made: list[Inputs] = []
        if self._attempt(EVERY_METHOD, problem.seq_len, lambda: made.append(whole_inputs(problem))):
            for method in methods:
                self._attempt(method.name, problem.seq_len, lambda: self._measure(method, problem, *made))  # noqa: B023

    def _write(self) -> None:
        if self._parallel.rank == 0:
            found = {"rows": self._rows, "absent": self._absent}
            (self._assignment.folder / RESULTS).write_text(json.dumps({"node_size": self._parallel.node_size, **found}))

    def _is_right(self, method: Method) -> bool:
        """Return whether a method can run here and computes what its index says, on a small problem."""
        small = replace(self._assignment.problem, seq_len=CHECKED_BLOCKS * self._parallel.world_size * OURS.block_size)
        return self._attempt(method.name, None, lambda: check_runs(method, small)) and self._attempt(
            method.name, None, lambda: check_layer(method, small, self._parallel)
        )

    def _attempt(self, method: str, seq_len: int | None, body: Callable[[], None]) -> bool:
        """Run a body on all ranks, unless time is up; what they raised leaves the method out everywhere.

        Only what is not there is no failure. Where all ranks raise, as by a refusal or for want of memory, the next one
        has its turn. A rank that raises where others do not leaves them in the body's collectives, and the job ends at
        their timeout: what it raised is then in its file.
        """
        late = torch.tensor(float(time.time() > self._assignment.deadline), device=self._parallel.device)
        dist.all_reduce(late)
        if late > 0:
            self._leave_out(method, seq_len, "The time of the whole run was used up.")
            self._write()
            return False
        error: _Failure | None = None
        try:
            body()
        except Exception as caught:  # whatever a peer raises
            error = _Failure.of(caught)
        file = self._assignment.folder / ERRORS.format(rank=self._parallel.rank)
        if error is not None:
            why = f"Rank {self._parallel.rank}: {error.why}"
            file.write_text(json.dumps({**self._where(method, seq_len), "why": why, "failed": True}))
            self._let_go()
        errors: list[_Failure | None] = [None] * self._parallel.world_size
        dist.all_gather_object(errors, error)
        file.unlink(missing_ok=True)
        said = _Failure.said(errors)
        if said is not None:
            self._leave_out(method, seq_len, said.why, failed=said.failed)
        self._write()
        return said is None

    def _let_go(self) -> None:
        """Let go of what a failed body held: the next one finds the memory that it would have found without it."""
        gc.collect()
        if self._parallel.device.type == "cuda":
            torch.cuda.empty_cache()

    def _leave_out(self, method: str, seq_len: int | None, why: str, *, failed: bool = False) -> None:
        self._absent.append({**self._where(method, seq_len), "why": why, "failed": failed})

    def _where(self, method: str, seq_len: int | None) -> dict[str, Any]:
        return {"ranks": self._parallel.world_size, "seq": seq_len, "method": method}

    def _measure(self, method: Method, problem: Problem, whole: Inputs) -> None:
        layer = layer_of(method, problem, whole, self._parallel)
        index, warm_up_s = self._warm_up(layer)
        row = {
            "ranks": self._parallel.world_size,
            "seq": problem.seq_len,
            "method": method.name,
            **self._shares(method, layer, index, problem),
            **self._times(layer, warm_up_s),
        }
        if method.is_replayed and self._parallel.world_size > 1:
            row |= self._interleaved(layer, RingLayer(METHODS[0], problem, whole, self._parallel), index)
            if self._parallel.rank == 0:
                row["index"] = self._save(index, problem.seq_len)
        self._rows.append(row)

    def _save(self, index: VerticalSlashIndex, seq_len: int) -> str:
        """Save the index and return the file's name. All replayed methods select the same index."""
        path = self._assignment.folder / f"{self._parallel.world_size}x{seq_len}.pt"
        if not path.exists():
            torch.save((*(tensor.cpu() for tensor in index.tensors), index.block_size), path)
        return path.name

    def _warm_up(self, layer: Layer) -> tuple[AttentionIndex | None, float]:
        """Return the index, and seconds of a call on the slowest rank."""
        for _ in range(2):
            self._stopwatch.begin()
            began = time.perf_counter()
            index = layer.select()
            torch.autograd.grad(layer.attend(index), layer.leaves, layer.grad_out)
            self._stopwatch.settle()
            slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=self._parallel.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if slowest > self._assignment.longest_s:
                break
        return index, float(slowest)

    def _times(self, layer: Layer, warm_up_s: float) -> dict[str, Any]:
        """Return medians over repeats, of the slowest rank in each."""
        repeats = max(1, min(self._assignment.repeats, int(self._assignment.longest_s / warm_up_s)))
        on_gpu = self._parallel.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        samples = torch.tensor([self._sample(layer) for _ in range(repeats)], device=self._parallel.device)
        extra = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        parts = [torch.empty_like(samples) for _ in range(self._parallel.world_size)]
        dist.all_gather(parts, samples)
        by_rank = torch.stack(parts)  # [ranks, repeats, phases]
        select, forward, backward = by_rank.amax(0).median(0).values.tolist()
        total = float(by_rank.sum(2).amax(0).median())
        phases = {"select_ms": select, "forward_ms": forward, "backward_ms": backward, "total_ms": total}
        return {**phases, "repeats": repeats, "extra_mib": extra / 2**20 if on_gpu else None}

    def _sample(self, layer: Layer) -> list[float]:
        stopwatch = self._stopwatch
        stopwatch.begin()
        marks = [stopwatch.mark()]
        index = layer.select()
        marks.append(stopwatch.mark())
        out = layer.attend(index)
        marks.append(stopwatch.mark())
        torch.autograd.grad(out, layer.leaves, layer.grad_out)
        marks.append(stopwatch.mark())
        stopwatch.settle()
        return [stopwatch.ms(first, second) for first, second in zip(marks, marks[1:], strict=False)]

    def _interleaved(self, layer: RingLayer, even: RingLayer, index: VerticalSlashIndex) -> dict[str, Any]:
        """Time the ring's calls, and the same operations alone; by turns, since clocks follow the load.

        Args:
            layer: whose ring.
            even: whose own keys are a dry run uses; the same for every method, whose steps are predicted from it.
            index: of the method.
        """
        dry_run = DryRun(even, index, self._parallel, self._stopwatch)
        calls: dict[str, list[CallTimes]] = {"ring": [], "alone": [], "beside": []}
        for _ in range(STEP_REPEATS):
            calls["ring"].append(self._ring_call(layer, index))
            calls["alone"].append(dry_run.call(beside=False))
            calls["beside"].append(dry_run.call(beside=True))
        calibration = calibrate(even, index, self._parallel, self._stopwatch, dry_run, calls)
        ranks: list[Any] = [None] * self._parallel.world_size
        dist.all_gather_object(ranks, CallTimes.median(calls["ring"]))
        return {
            "steps": {name: [rank.steps[name] for rank in ranks] for name in DIRECTIONS},
            "calls": {name: max(rank.whole[name] for rank in ranks) for name in DIRECTIONS},
            "sm_mhz": ranks[0].sm_mhz,
            "calibration": asdict(calibration),
        }

    def _ring_call(self, layer: RingLayer, index: VerticalSlashIndex) -> CallTimes:
        def forward(clock: StepClock) -> torch.Tensor:
            return layer.attend_on(clock, index)

        def backward(_: StepClock, out: torch.Tensor) -> None:
            torch.autograd.grad(out, layer.leaves, layer.grad_out)

        return time_call(self._stopwatch, layer.backend(), forward, backward)

    def _shares(
        self, method: Method, layer: Layer, index: AttentionIndex | None, problem: Problem
    ) -> dict[str, float | None]:
        """Return the share of the causal pairs, and the share of the attention at held-out rows that falls on them."""
        if index is None or method.config.pattern == "dense":
            return {"density": 1.0, "recall": 1.0}
        causal = float(causal_pairs(_one_list(problem), seq_len=problem.seq_len).sum())
        if isinstance(index, BlockListIndex):
            pairs = computed_pairs_of_lists(index, layer.layout, cp_rank=self._parallel.rank).sum()
            dist.all_reduce(pairs)
        else:
            pairs = computed_pairs(index, seq_len=problem.seq_len).sum()
        rows = held_out_rows(OURS, seq_len=problem.seq_len, count=RECALL_ROWS)
        query, key, _ = (leaf.detach() for leaf in layer.leaves)
        recall = attention_recall(query, key, index, rows=rows, layout=layer.layout, groups=dist.group.WORLD).mean()
        return {"density": float(pairs) / causal / index.num_lists, "recall": float(recall)}


def _one_list(problem: Problem) -> VerticalSlashIndex:
    return VerticalSlashIndex.dense(rows=problem.batch, num_heads=1, seq_len=problem.seq_len)
