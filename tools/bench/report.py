"""Tables for people, and a stamped file for everybody else."""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_mtraining.console import text_table

from .clock import Timing
from .measure import Case, Row
from .problem import DTYPES, Problem

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = ROOT / "docs" / "benchmarks"

COLUMNS: list[tuple[str, str, Callable[[Row], str | None]]] = [
    ("ms", "ms", lambda row: f"{row.ms:.3f}"),
    ("tflops", "TFLOP/s", lambda row: f"{row.tflops:.4g}"),
    ("density", "density %", lambda row: f"{100 * row.density:.2f}"),
    ("efficiency", "efficiency", lambda row: f"{row.efficiency:.2f}"),
    ("issued_per_useful", "issued/useful", lambda row: f"{row.issued_per_useful:.2f}"),
    ("share_of_forward", "% of forward", lambda row: f"{100 * row.share_of_forward:.2f}"),
    ("extra_mib", "extra MiB", lambda row: f"{row.extra_mib:.0f}"),
    ("step_mib", "step MiB", lambda row: f"{row.step_mib:.0f}"),
    ("sm_mhz", "MHz", lambda row: f"{row.sm_mhz:.0f}"),
]
"""Field, heading and format; a column without a value in any row is not shown."""

LEGEND = """\
ms: median of interleaved repeats. TFLOP/s: useful, forward 4 and backward 10 times computed pairs times head_dim.
density: share of causal pairs. efficiency: fastest dense ms * density / ms. issued: pairs of a
forward's products. extra MiB: peak memory beyond inputs, outputs and gradients; step MiB: of forward and backward.
% of forward: of this package's fastest sparse forward. MHz: the card's clock right after a call."""


def case_lines(problem: Problem, case: Case) -> list[str]:
    """Return one table for each operation, then the missing baselines with reasons."""
    lists = f"{case.distances:.0f} distances and {case.verticals:.0f} verticals a head"
    lines = ["", f"{problem}; {case.label}: density {100 * case.density:.2f} %, {lists}"]
    for operation, rows in case.rows.items():
        lines += ["", *table_lines(operation, rows)]
    missing = [f"{name}: not measured. {why}" for name, why in case.absent.items()]
    missing += [f"{name}: FAILED its check, no speed is given. {why}" for name, why in case.failed.items()]
    return [*lines, "", *missing] if missing else lines


def table_lines(operation: str, rows: list[Row]) -> list[str]:
    """Return a table with a line for each baseline."""
    shown = [column for column in COLUMNS if any(getattr(row, column[0]) is not None for row in rows)]
    cells = [
        [row.baseline, *(form(row) if getattr(row, name) is not None else "" for name, _, form in shown)]
        for row in rows
    ]
    return text_table([operation, *(heading for _, heading, _ in shown)], cells)


def stamp(problem: Problem, command: list[str], *, timing: Timing, commit: str | None) -> dict[str, object]:
    """Return everything that a number depends on and its reader cannot see."""
    on_gpu = problem.device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "tools.bench.run", *command]),
        "commit": commit or commit_of_checkout(),
        "gpu": torch.cuda.get_device_name(problem.device) if on_gpu else None,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
        "python": sys.version.split()[0],
        **asdict(timing),
        "problem": {**_sizes(problem), "dtype": _dtype_name(problem), "device": str(problem.device)},
    }


def _cudnn_version() -> int | None:
    """Return the version of the loaded library; None where a baseline has loaded another than torch was built for."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError:
        return None


def write_json(path: Path, stamped: dict[str, object], cases: list[Case]) -> None:
    """Write the stamp and all numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**stamped, "cases": [asdict(case) for case in cases]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def default_path(problem: Problem, theme: str) -> Path:
    """Return ``theme_hardware_date.json`` in the project's folder of results."""
    hardware = torch.cuda.get_device_name(problem.device) if problem.device.type == "cuda" else "cpu"
    name = hardware.lower().replace("nvidia ", "").replace(" ", "-")
    return DEFAULT_FOLDER / f"{theme}_{name}_{datetime.date.today().isoformat()}.json"


def _sizes(problem: Problem) -> dict[str, int]:
    names = ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "seed")
    return {name: getattr(problem, name) for name in names}


def _dtype_name(problem: Problem) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == problem.dtype)


def commit_of_checkout() -> str:
    """Return the commit that runs, ``-dirty`` where files differ from it."""
    head = _output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head + ("-dirty" if _output_of("git", "-C", str(ROOT), "status", "--porcelain") else "")


def _output_of(*command: str) -> str | None:
    """Return the first line that a command prints, or None where it cannot run or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip().split("\n")[0]
