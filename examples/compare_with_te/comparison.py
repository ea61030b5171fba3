"""The two small computations behind run.sh: the counts that make a density, and the table of its logs.

python comparison.py counts --seq-length 131072 --density 0.05 --max-vertical 1024
python comparison.py table outputs/compare_with_te
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_mtraining.metrics.indices import max_slash_for

DENSE = "transformer_engine"
_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ .*?elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r"lm loss: (\S+)")
_DENSITY = re.compile(r"\bdensity \(%\): ([\d.]+)")
_MEMORY = re.compile(r"\| max allocated: ([\d.]+)")
_ERROR = re.compile(r"Error\b|Exception\b|must be |assert|Killed|Signal")


@dataclass(slots=True)
class Run:
    """What one log says. Times in milliseconds."""

    contender: str
    seq_length: int
    status: int
    iteration_ms: float | None
    """Median over the iterations after the warm-up; None when there is none."""
    kept_density: float | None
    """Density of the last iteration, mean over layers and heads; 1 for dense runs."""
    max_allocated_mib: float | None
    """Peak of what torch had allocated on the first rank, as Megatron reports it."""
    flags: list[str]
    """What pretrain_gpt.py was given, where the run left it beside its log."""
    losses: list[float]
    error: list[str]
    """The last lines that look like an error, of a run that failed."""


def read_run(log: Path, *, warm_up: int) -> Run:
    """Reads ``<contender>_<seq_length>.log`` and the exit status beside it."""
    contender, _, seq_length = log.stem.rpartition("_")
    lines = log.read_text(errors="replace").splitlines()
    times, losses, densities, peaks = [], [], [], []
    for line in lines:
        if match := _ITERATION.search(line):
            times += [float(match[2])] if int(match[1]) > warm_up else []
            losses += [float(loss) for loss in _LOSS.findall(line)]
        densities += [float(percent) / 100 for percent in _DENSITY.findall(line)]
        peaks += [float(mebibytes) for mebibytes in _MEMORY.findall(line)]
    status = int(log.with_suffix(".status").read_text())
    flags = log.with_suffix(".flags")
    return Run(
        contender=contender,
        seq_length=int(seq_length),
        status=status,
        iteration_ms=statistics.median(times) if times else None,
        kept_density=1.0 if contender == DENSE else densities[-1] if densities else None,
        max_allocated_mib=max(peaks, default=None),
        flags=flags.read_text().splitlines() if flags.exists() else [],
        losses=losses,
        error=_last_errors(lines) if status else [],
    )


def table(runs: list[Run]) -> str:
    """The runs, one a line, with how many times faster than TransformerEngine each was."""
    rows = [("tokens", "contender", "iteration ms", "faster", "density", "peak MiB", "loss, first", "loss, last")]
    dense_ms = {run.seq_length: run.iteration_ms for run in runs if run.contender == DENSE}
    for run in sorted(runs, key=lambda run: (run.seq_length, run.contender != DENSE)):
        baseline = dense_ms.get(run.seq_length)
        faster = baseline / run.iteration_ms if baseline and run.iteration_ms else None
        first, last = (run.losses[0], run.losses[-1]) if run.losses else (None, None)
        rows.append(
            (
                str(run.seq_length),
                run.contender,
                _number(run.iteration_ms, ".1f"),
                _number(faster, ".2f"),
                _number(run.kept_density, ".2%"),
                _number(run.max_allocated_mib, ".0f"),
                _number(first, ".5f"),
                _number(last, ".5f"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Prints flags or the table; the exit status is 1 when a run of the table failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    counts = actions.add_parser("counts", help="print the flags of budget fixed that make a density at random weights")
    counts.add_argument("--seq-length", type=int, required=True)
    counts.add_argument("--density", type=float, required=True)
    counts.add_argument("--max-vertical", type=int, required=True)
    results = actions.add_parser("table", help="print what the logs of a folder say, and write results.json there")
    results.add_argument("folder", type=Path)
    results.add_argument("--warm-up", type=int, default=3, help="first iterations that are not timed")
    options = parser.parse_args(arguments)
    if options.action == "counts":
        try:
            max_slash = max_slash_for(
                options.seq_length, target_density=options.density, max_vertical=options.max_vertical
            )
        except ValueError as error:
            parser.error(str(error))
        print(f"--mtraining-max-vertical {options.max_vertical} --mtraining-max-slash {max_slash}")
        return 0
    runs = [read_run(log, warm_up=options.warm_up) for log in sorted(options.folder.glob("*_*.log"))]
    (options.folder / "results.json").write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=2) + "\n")
    print(table(runs))
    for run in (run for run in runs if run.status):
        print(f"\n{run.contender} at {run.seq_length} tokens ended with status {run.status}:", *run.error, sep="\n  ")
    return int(any(run.status for run in runs))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _last_errors(lines: list[str], *, count: int = 3) -> list[str]:
    """The last lines that name an error, without the launcher's own summary; else the last lines."""
    told = [line.strip() for line in lines if _ERROR.search(line) and "ChildFailedError" not in line]
    return (told or [line.strip() for line in lines if line.strip()])[-count:]


if __name__ == "__main__":
    sys.exit(main())
