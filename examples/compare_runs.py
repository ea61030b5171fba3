"""Compares the losses of two runs of train_tiny_gpt.py: do other ranks, devices or schedules train the same model?

    python examples/compare_runs.py A/journal.json B/journal.json --tolerance 1e-3

Both runs need the same text (``--data``) and the same options. Losses in float32 drift apart by rounding, more so once
a rounding has chosen another key; the dense warm-up and the sparse steps are therefore shown apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Prints the differences; the exit status is 1 when a relative one is over the tolerance."""
    parser = argparse.ArgumentParser(description="Compare the losses of two runs of train_tiny_gpt.py.")
    parser.add_argument("journals", type=Path, nargs=2, help="journal.json of either run")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest relative difference that passes")
    options = parser.parse_args(arguments)
    first, second = (json.loads(path.read_text()) for path in options.journals)
    for name in ("dense_steps", "losses"):
        values = [journal[name] if name == "dense_steps" else len(journal[name]) for journal in (first, second)]
        if values[0] != values[1]:
            parser.error(f"{name} must be equal in both runs, got {values[0]} and {values[1]}.")
    differences = phase_differences(first, second)
    for phase, difference in differences.items():
        print(f"{phase:22} largest relative difference {difference:.1e}")
    return int(max(differences.values()) > options.tolerance)


def phase_differences(first: dict, second: dict) -> dict[str, float]:
    """The largest relative difference of the losses in each phase of two journals of equal length."""
    dense = first["dense_steps"]
    phases = {
        "dense warm-up": [journal["losses"][:dense] for journal in (first, second)],
        "sparse steps": [journal["losses"][dense:] for journal in (first, second)],
        "validation, sparse": [[journal["final"]["sparse_loss"]] for journal in (first, second)],
        "validation, dense": [[journal["final"]["dense_loss"]] for journal in (first, second)],
    }
    return {
        phase: max((abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)), default=0.0)
        for phase, losses in phases.items()
    }


if __name__ == "__main__":
    sys.exit(main())
