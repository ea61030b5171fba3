"""Measured steps of a ring beside what a replay of its index predicts for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.metrics import rank_pairs, work_of_pairs
from megatron_mtraining.planner.clock import CallSizes, predict, step_seconds
from megatron_mtraining.ring import RingShape
from megatron_mtraining.types import VerticalSlashIndex

from ..problem import Problem
from .calibration import Calibration
from .methods import METHODS
from .step_clock import DIRECTIONS

GOAL = 0.1
"""Relative error that a prediction may have."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """One direction of one method on one number of ranks; times in milliseconds."""

    ranks: int
    seq: int
    method: str
    direction: str
    measured_steps: list[list[float]]
    """Measured times by rank and step."""

    predicted_steps: list[list[float]]
    measured_ms: float
    """Time of the whole call on the slowest rank."""

    predicted_ms: float
    pair_worker_imbalance: float
    """Imbalance of counted pairs."""

    pair_lockstep_imbalance: float
    beside_ms: float
    """Part of the predicted steps of a rank that transfers beside them take."""

    sm_mhz: tuple[float | None, float | None]
    """Clock of the first rank's multiprocessors after the ring's calls, and after dry runs."""

    @property
    def worker_imbalance(self) -> tuple[float, float]:
        """Busiest over mean rank, of measured and of predicted time."""
        return tuple(float(steps.sum(1).max() / steps.sum(1).mean()) for steps in self._tables())

    @property
    def lockstep_imbalance(self) -> tuple[float, float]:
        """Busiest rank of every step, added up, over the mean rank."""
        return tuple(float(steps.amax(0).sum() / steps.sum(1).mean()) for steps in self._tables())

    @property
    def rank_error(self) -> float:
        """Largest relative error of a rank's computing in all."""
        measured, predicted = (steps.sum(1) for steps in self._tables())
        return float((predicted / measured - 1).abs().max())

    @property
    def step_error(self) -> float:
        """Largest error of a rank's step, over the mean step."""
        measured, predicted = self._tables()
        return float((predicted - measured).abs().max() / measured.mean())

    @property
    def time_error(self) -> float:
        """Relative error of the whole call; above 0 where the prediction is too slow."""
        return self.predicted_ms / self.measured_ms - 1

    def _tables(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.measured_steps).double(), torch.tensor(self.predicted_steps).double()

    def numbers(self) -> dict[str, Any]:
        """Return the numbers for a file."""
        names = ("ranks", "seq", "method", "direction", "measured_ms", "predicted_ms")
        derived = ("worker_imbalance", "lockstep_imbalance", "rank_error", "step_error", "time_error")
        steps = ("pair_worker_imbalance", "pair_lockstep_imbalance", "measured_steps", "predicted_steps")
        conditions = ("beside_ms", "sm_mhz")
        return {name: getattr(self, name) for name in (*names, *derived, *steps, *conditions)}


def balances(results: dict[str, Any], problem: Problem, folder: Path) -> Iterator[Balance]:
    """Yield the balances of every method of one number of ranks, more than one, whose steps were timed.

    Args:
        results: what the ranks wrote.
        problem: the sizes, but for the length.
        folder: where they left their indices.
    """
    for row in results["rows"]:
        if "steps" in row:
            yield from _of_row(row, results["node_size"], replace(problem, seq_len=row["seq"]), folder)


def _of_row(row: dict[str, Any], node_size: int, problem: Problem, folder: Path) -> Iterator[Balance]:
    calibration = Calibration(**row["calibration"])
    config = next(method.config for method in METHODS if method.name == row["method"])
    index = _load_index(folder / row["index"])
    layout = SequenceLayout(config.layout, seq_len=row["seq"], cp_size=row["ranks"], node_size=node_size)
    ring = RingShape(kind=config.schedule, cp_size=row["ranks"], node_size=node_size)
    work = work_of_pairs(*rank_pairs(index, layout), ring.source_ranks())
    sizes = CallSizes(
        seq_len=row["seq"],
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
    )
    for direction in DIRECTIONS:
        profile = calibration.profile(direction, head_dim=problem.head_dim)
        seconds = step_seconds(direction, work, profile, ring=ring, head_dim=problem.head_dim)
        prediction = getattr(predict(work, ring, sizes, profile, pack_width=index.vertical.shape[2]), direction)
        beside_ms = calibration.beside_ms(direction, ring, sizes)
        yield Balance(
            ranks=row["ranks"],
            seq=row["seq"],
            method=row["method"],
            direction=direction,
            measured_steps=row["steps"][direction],
            predicted_steps=(1e3 * seconds + beside_ms).tolist(),
            measured_ms=row["calls"][direction],
            predicted_ms=prediction.gpu_ms + float(beside_ms.sum()),
            pair_worker_imbalance=work.worker_imbalance,
            pair_lockstep_imbalance=work.step_imbalance,
            beside_ms=float(beside_ms.sum()),
            sm_mhz=(row["sm_mhz"], calibration.sm_mhz),
        )


def _load_index(path: Path) -> VerticalSlashIndex:
    *tensors, block_size = torch.load(path, weights_only=True)
    return VerticalSlashIndex(*tensors, block_size=block_size)
