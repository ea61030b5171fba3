"""Run Megatron-LM's own tests with this attention instead of theirs, and print what passed, failed and why.

    python -m tools.megatron_tests TREE [--suite NAME ...] [--json FILE]

TREE is an unmodified Megatron-LM tree of core 0.19 or later; nothing is written to it. With GPUs the tests run on them,
else on CPUs over gloo with ``megatron_mtraining.testing.megatron_on_cpu``. They need pytest and click.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from megatron_mtraining.arguments import CommandParser

from .suites import SUITES, Suite

ROOT = Path(__file__).resolve().parents[2]
UNIT_TESTS = Path("tests/unit_tests")
_TIMEOUT_SECONDS = 1800


def main(arguments: list[str] | None = None) -> int:
    """Run the suites; the exit status is 1 when a test that applies did not pass."""
    parser = CommandParser(prog="python -m tools.megatron_tests", description=__doc__)
    parser.add_argument("tree", type=Path, help="an unmodified Megatron-LM tree")
    parser.add_argument("--suite", nargs="+", choices=[suite.name for suite in SUITES], help="default: all")
    parser.add_argument("--json", type=Path, help="also write every outcome there")
    options = parser.parse_args(arguments)
    if not (options.tree / UNIT_TESTS).is_dir():
        parser.error(f"TREE must hold {UNIT_TESTS}, got {options.tree}.")
    outcomes = {}
    for suite in (suite for suite in SUITES if not options.suite or suite.name in options.suite):
        outcomes[suite.name] = run(suite, options.tree.resolve())
        print(summary(suite, outcomes[suite.name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    return int(any(outcome == "failed" for tests in outcomes.values() for outcome, _ in tests.values()))


def run(suite: Suite, tree: Path) -> dict[str, tuple[str, str]]:
    """Return outcome and reason of each test of a suite; the worst of its ranks."""
    tests = [str(UNIT_TESTS / test) for test in suite.tests if (tree / UNIT_TESTS / test.split("::")[0]).is_file()]
    skipped = suite.skipped | ({} if torch.cuda.is_available() else suite.skipped_on_cpu)
    # A file that cannot be imported here ends pytest's collection, so it is not handed over at all.
    unread = {test: reason for test in tests for pattern, reason in skipped.items() if re.search(pattern, test)}
    tests = [test for test in tests if test not in unread]
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(suite.ranks)]
        rank = [str(Path(__file__).with_name("rank.py")), folder, "selected" if suite.selected else "loaded"]
        subprocess.run(
            [*launch, *rank, *tests],
            cwd=tree,
            env=_environment(tree) | {"MEGATRON_TESTS_SKIPPED": json.dumps(skipped)},
            stdout=sys.stderr,
            timeout=_TIMEOUT_SECONDS,
        )
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if len(reports) < suite.ranks:
        return {"the whole suite": ("failed", f"{suite.ranks - len(reports)} of {suite.ranks} ranks ended early")}
    outcomes = {test: _worst([report.get(test) for report in reports]) for test in reports[0]}
    return outcomes | {test: ("skipped", f"not applicable: {reason}") for test, reason in unread.items()}


def summary(suite: Suite, outcomes: dict[str, tuple[str, str]]) -> str:
    """Return a few lines: how many tests of each file passed, and other outcomes by function, with reason and count."""
    counts = collections.Counter(outcome for outcome, _ in outcomes.values())
    lines = [f"{suite.name} ({suite.ranks} ranks): " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items())]
    lines.append(f"  {suite.proves}")
    groups = collections.Counter(
        (outcome, _file(test) if outcome == "passed" else _function(test), reason)
        for test, (outcome, reason) in outcomes.items()
    )
    lines += [f"  {count:4} {' '.join(filter(None, group))}" for group, count in sorted(groups.items())]
    return "\n".join(lines)


def _file(test: str) -> str:
    return _function(test).split("::")[0]


def _function(test: str) -> str:
    return re.sub(r"\[.*\]$", "", test).removeprefix(f"{UNIT_TESTS}/")


def _worst(outcomes: list[tuple[str, str] | None]) -> tuple[str, str]:
    """Return the worst outcome: a test that one rank skipped or did not reach has not passed."""
    ran = [tuple(outcome or ("failed", "did not run on every rank")) for outcome in outcomes]
    return min(ran, key=lambda outcome: ("failed", "skipped", "passed").index(outcome[0]))


def _environment(tree: Path) -> dict[str, str]:
    paths = [str(tree), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
