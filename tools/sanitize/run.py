"""Run every CUDA kernel on small shapes under compute-sanitizer, on any machine with a GPU.

    python -m tools.sanitize.run
    python -m tools.sanitize.run --tools memcheck synccheck --tests tests/gpu/test_cuda_rows.py

memcheck: no access outside of an allocation (each tensor is an allocation of its own here, with a gap behind it);
racecheck: no hazard in shared memory. First a launch is told of a longer tensor than it gets, and memcheck must see it,
so that a silent tool is not taken for a clean kernel. Only this project's kernels are instrumented.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from megatron_mtraining.arguments import CommandParser

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
DEFAULT_TESTS = ("tests/gpu/test_cuda_small.py", "tests/gpu/test_cuda_rows.py")
OPTIONS = {"memcheck": ["--padding", "256"], "racecheck": ["--print-limit", "1000"]}
_FAULT = re.compile(r"^========= +(Invalid .+|.*Race reported .+|and \w+ access .+|at (?!0x).+)$", re.MULTILINE)
_LOCATION = re.compile(r"\+?0x[0-9a-f]+| \[\d+ hazards?\]|\(mtraining::.*\)| in \S+:\d+")
_SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", re.MULTILINE)


def find_sanitizer() -> str:
    """Return compute-sanitizer of PATH or of the CUDA toolkit.

    Raises:
        SystemExit: there is none.
    """
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not found:
        raise SystemExit("compute-sanitizer must be on PATH, got none. Install the CUDA toolkit's sanitizer package.")
    return found


def command(sanitizer: str, tool: str, program: list[str]) -> list[str]:
    """Return the command line that runs ``program`` under ``tool``."""
    ours = ["--kernel-name", "kernel_substring=mtraining"]
    return [sanitizer, "--tool", tool, *OPTIONS.get(tool, []), *ours, "--error-exitcode", "99", *program]


def environment() -> dict[str, str]:
    """Return an environment of one allocation for each tensor, and kernels that are loaded when first used."""
    return os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1"}


def found_by_tool(report: str) -> int | None:
    """Return errors or hazards that the summary counts, or None where the tool wrote no summary."""
    counts = _SUMMARY.findall(report)
    return sum(map(int, counts)) if counts else None


def faults(report: str, most: int = 8) -> list[str]:
    """Return the findings by kernel: the report's own lines without addresses, counted, the commonest first."""
    counts = Counter(_LOCATION.sub("", line).strip() for line in _FAULT.findall(report))
    return [f"{count:6} x {line}" for line, count in counts.most_common(most)]


def start(sanitizer: str, tool: str, program: list[str], log: Path) -> subprocess.Popen:
    """Start a run that writes all it says to ``log``."""
    with log.open("w") as output:
        arguments = command(sanitizer, tool, program)
        return subprocess.Popen(arguments, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT)


def verdict(tool: str, status: int, report: str, *, must_find: bool) -> str:
    """Return the meaning of a finished run, in one sentence; ``OK`` leads when it is what it should be."""
    count = found_by_tool(report)
    if count is None:
        return f"FAILED {tool} wrote no summary (status {status}); see its log."
    if must_find:
        return f"OK {tool} sees a planted fault" if count else f"FAILED {tool} must see a planted fault, got 0 errors."
    if count or status:
        return f"FAILED {tool} must find nothing in passing tests, got {count} (status {status}); see its log."
    return f"OK {tool} found 0; tests passed: {_last_line(report)}"


def _last_line(report: str) -> str:
    """Return pytest's own summary."""
    lines = [line.strip("= ") for line in report.splitlines() if re.search(r"\d+ passed", line)]
    return lines[-1] if lines else "none"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(prog="python -m tools.sanitize.run", description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--tests", nargs="+", default=list(DEFAULT_TESTS), help="what pytest runs")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a tool may take")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/sanitize"), help="where logs are written")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the tools side by side; return 1 when one found something or could not run."""
    options = parse()
    sanitizer = find_sanitizer()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options.tests]
    planted = [sys.executable, "-m", "tools.sanitize.planted"]
    runs = {"planted": ("memcheck", planted), **{tool: (tool, tests) for tool in options.tools}}
    began, status = time.perf_counter(), 0
    logs = {name: options.output_dir / f"{name}.log" for name in runs}
    started = {name: start(sanitizer, tool, program, logs[name]) for name, (tool, program) in runs.items()}
    for name, process in started.items():
        try:
            code = process.wait(max(1.0, options.timeout - (time.perf_counter() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        report = logs[name].read_text(errors="replace")
        line = verdict(runs[name][0], code, report, must_find=name == "planted")
        print(f"{line} ({time.perf_counter() - began:.0f} s, {logs[name]})", flush=True)
        if not line.startswith("OK"):
            print("\n".join(faults(report)), flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
