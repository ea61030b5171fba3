"""Compares the losses of two runs of train_tiny_gpt.py: do other ranks, devices or kernels train the same model?

    python examples/compare_runs.py A/journal.json B/journal.json --tolerance 1e-3
    python examples/compare_runs.py KERNELS/journal.json PLAIN/journal.json --exact FLOAT32/journal.json

The runs need the same text (``--data``) and the same options. Losses drift apart by rounding, more so once a rounding
has chosen another key; the dense warm-up and the sparse steps are therefore shown apart. In bfloat16 the first run is
judged as every result of this project is: it may be twice as far from the same run in float32 as the second is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Prints the differences; the exit status is 1 when a relative one is over what is allowed."""
    parser = argparse.ArgumentParser(description="Compare the losses of two runs of train_tiny_gpt.py.")
    parser.add_argument("journals", type=Path, nargs=2, help="journal.json of either run")
    parser.add_argument("--exact", type=Path, help="journal.json of a run in float32 that both are compared with")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative difference that always passes")
    options = parser.parse_args(arguments)
    paths = [*options.journals, *([options.exact] if options.exact else [])]
    try:
        first, second, *exact = (read_journal(path) for path in paths)
    except ValueError as error:
        parser.error(str(error))
    for name in ("dense_steps", "losses"):
        values = {path: _extent(journal[name]) for path, journal in zip(paths, (first, second, *exact), strict=True)}
        if len(set(values.values())) > 1:
            parser.error(f"{name} must be equal in all runs, got {', '.join(map(str, values.values()))}.")
    if exact:
        return _judge_against_exact(first, second, *exact, tolerance=options.tolerance)
    differences = phase_differences(first, second)
    for phase, difference in differences.items():
        print(f"{phase:22} largest relative difference {difference:.1e}")
    return int(not _largest(differences.values()) <= options.tolerance)


def read_journal(path: Path) -> dict:
    """The journal in a file.

    Raises:
        ValueError: it is none of a finished run.
    """
    try:
        journal = json.loads(path.read_text())
        _ = journal["losses"], journal["dense_steps"], journal["final"]["sparse_loss"], journal["final"]["dense_loss"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} must be the journal.json of a finished run, got {reason}.") from None
    return journal


def _judge_against_exact(first: dict, second: dict, exact: dict, *, tolerance: float) -> int:
    """Prints how far either run is from the exact one; 1 when the first is too far."""
    status = 0
    second_errors = phase_differences(exact, second)
    for phase, error in phase_differences(exact, first).items():
        allowed = 2 * second_errors[phase] + tolerance
        print(f"{phase:22} first {error:.1e}, second {second_errors[phase]:.1e} from float32; allowed {allowed:.1e}")
        status |= int(not error <= allowed)
    return status


def _extent(entry: int | list[float]) -> int:
    """A journal's count of steps, or how many losses it has."""
    return entry if isinstance(entry, int) else len(entry)


def phase_differences(first: dict, second: dict) -> dict[str, float]:
    """The largest difference of the losses in each phase of two journals of equal length, relative to the first's."""
    dense = first["dense_steps"]
    phases = {
        "dense warm-up": [journal["losses"][:dense] for journal in (first, second)],
        "sparse steps": [journal["losses"][dense:] for journal in (first, second)],
        "validation, sparse": [[journal["final"]["sparse_loss"]] for journal in (first, second)],
        "validation, dense": [[journal["final"]["dense_loss"]] for journal in (first, second)],
    }
    return {
        phase: _largest(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)) for phase, losses in phases.items()
    }


def _largest(values: Iterable[float]) -> float:
    """The largest value, NaN where there is one (the built-in max loses it), 0 where there is none."""
    return max(values, key=lambda value: (math.isnan(value), value), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
