"""Print what ptxas reported for each compiled kernel, and fail when one spills registers or needs a stack.

    python setup.py build_ext --inplace && python -m tools.kernels_report

Reads the ``.log`` files that setup.py leaves under build/kernels; needs neither a GPU nor torch. Names are readable
where c++filt is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(slots=True)
class KernelReport:
    """One kernel for one architecture."""

    name: str
    architecture: str
    registers: int = 0
    shared_bytes: int = 0
    """Static shared memory; dynamic shared memory of a launch is not included."""
    stack_bytes: int = 0
    spill_bytes: int = 0


def parse(log: str) -> list[KernelReport]:
    """Return the kernels of one ptxas report."""
    kernels: list[KernelReport] = []
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernels.append(KernelReport(entry[1], entry[2]))
        elif kernels and (stack := _STACK.search(line)):
            kernels[-1].stack_bytes = int(stack[1])
            kernels[-1].spill_bytes = int(stack[2]) + int(stack[3])
        elif kernels and (used := _USED.search(line)):
            kernels[-1].registers = int(used[1])
            kernels[-1].shared_bytes = int(shared[1]) if (shared := _SHARED.search(line)) else 0
    return kernels


def readable(name: str) -> str:
    """Return the kernel's C++ name without namespaces and arguments."""
    if shutil.which("c++filt"):
        name = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
        name = re.sub(r"\(anonymous namespace\)::|mtraining::|^void ", "", name)
        name = re.sub(r"\(AttentionParams.*|\(CUtensorMap.*", "", name)
    return name


def main() -> int:
    """Print the table; return 1 when a kernel spills, uses a stack, or when there is no report at all."""
    folder = Path(__file__).resolve().parents[1] / "build" / "kernels"
    kernels = [kernel for log in sorted(folder.glob("*.log")) for kernel in parse(log.read_text())]
    if not kernels:
        command = "MTRAINING_CUDA=1 python setup.py build_ext --inplace"
        print(f"No ptxas report under build/kernels. Run: {command}", file=sys.stderr)
        return 1
    print(f"{'registers':>9} {'shared':>7} {'stack':>6} {'spills':>7}  architecture  kernel")
    for k in kernels:
        sizes = f"{k.registers:9} {k.shared_bytes:7} {k.stack_bytes:6} {k.spill_bytes:7}"
        print(f"{sizes}  {k.architecture:12}  {readable(k.name)}")
    faulty = [k for k in kernels if k.stack_bytes or k.spill_bytes]
    print(f"{len(kernels)} kernels, {len(faulty)} with a stack or spills")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
