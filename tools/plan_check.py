"""Predict measured training runs and print how far time and memory are off.

    python -m tools.plan_check docs/benchmarks/pretrain_gpt/1*.json

A file is a list of runs as examples/compare_with_te writes it: each has ``flags`` (the arguments for pretrain_gpt.py),
``iteration_ms``, ``kept_density`` and, where memory was measured, ``max_allocated_mib`` of the fullest rank. Data
parallelism needs ``gpus`` too. Exit status 1: an error above the bounds, or nothing to compare.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_mtraining.arguments import CommandParser
from megatron_mtraining.console import text_table
from megatron_mtraining.errors import invalid
from megatron_mtraining.planner.attention_clock import AttentionClock, load_of_density
from megatron_mtraining.planner.memory import memory_of
from megatron_mtraining.planner.model import model_of_flags
from megatron_mtraining.planner.profile import Profile, load_profile
from megatron_mtraining.planner.step_time import step_time

from .plan_of_flags import flags_of, plan_of_flags

TIME_BOUND, MEMORY_BOUND = 0.15, 0.10
"""Relative errors that a prediction may have."""

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One run; times in milliseconds, memory in MiB."""

    name: str
    measured_ms: float
    predicted_ms: float
    measured_mib: float | None
    predicted_mib: float

    @property
    def time_error(self) -> float:
        """Relative error of the time; above 0 where the prediction is too slow."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of allocated memory."""
        return None if self.measured_mib is None else self.predicted_mib / self.measured_mib - 1

    @property
    def holds(self) -> bool:
        """True if both errors are within their bounds."""
        return abs(self.time_error) <= TIME_BOUND and abs(self.memory_error or 0.0) <= MEMORY_BOUND


def checks_of(path: Path, profile: Profile) -> Iterator[Check]:
    """Yield every run of a file that ended and says its flags.

    Raises:
        ValueError: the file is no list of runs, or a run has an option that is not predicted.
    """
    try:
        runs = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise invalid("a file of runs", "readable JSON", f"{path}: {error}") from None
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise invalid("a file of runs", "a list of mappings", path)
    for run in runs:
        if run.get("flags") and run.get("iteration_ms"):
            yield _check(run, profile)


def _check(run: dict[str, Any], profile: Profile) -> Check:
    flags = flags_of(run["flags"])
    plan = plan_of_flags(flags, gpus=run.get("gpus"))
    model = model_of_flags(flags, name=run["contender"])
    is_dense = not plan.pack_width
    most = int(flags.get("--mtraining-max-vertical", ("1024",))[0])
    load = load_of_density(plan.seq_len, 1 if is_dense else run["kept_density"], max_vertical=most)
    clock = AttentionClock(model=model, load=load, profile=profile)
    return Check(
        name=f"{run['contender']}, {plan.seq_len} tokens, {plan.sizes_text()}",
        measured_ms=run["iteration_ms"],
        predicted_ms=1e3 * step_time(model, plan, clock).total,
        measured_mib=run.get("max_allocated_mib"),
        predicted_mib=memory_of(model, plan).allocated / MIB,
    )


def lines(checks: Sequence[Check]) -> list[str]:
    """Return the lines of the table."""
    rows = []
    for check in checks:
        measured, error = "-", "-"
        if check.measured_mib is not None and check.memory_error is not None:
            measured, error = f"{check.measured_mib:.0f}", f"{check.memory_error:+.1%}"
        times = (f"{check.measured_ms:.1f}", f"{check.predicted_ms:.1f}", f"{check.time_error:+.1%}")
        rows.append((check.name, *times, measured, f"{check.predicted_mib:.0f}", error))
    return text_table(("run", "ms", "predicted", "error", "MiB", "predicted", "error"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is 1 where a bound is broken."""
    parser = CommandParser(prog="python -m tools.plan_check", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--profile", default="h200", help="a GPU by name, or a JSON file of a Profile's fields")
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.profile)
        checks = [check for path in options.files for check in checks_of(path, profile)]
    except ValueError as error:
        parser.error(str(error))
    if not checks:
        print("no run has flags and a time")
        return 1
    print("\n".join(lines(checks)))
    times = max(abs(check.time_error) for check in checks)
    sizes = [abs(check.memory_error) for check in checks if check.memory_error is not None]
    print(f"largest error in time {times:.1%}, bound {TIME_BOUND:.0%}")
    largest = f"{max(sizes):.1%}" if sizes else "not measured"
    print(f"largest error in memory {largest}, bound {MEMORY_BOUND:.0%}")
    return int(not all(check.holds for check in checks))


if __name__ == "__main__":
    sys.exit(main())
