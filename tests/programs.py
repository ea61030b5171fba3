"""Python programs in processes of their own, with the seconds spared in which they would import torch.

They are forks of :mod:`tests.program_server`, where ``subprocess`` would start an interpreter for each.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Ended:
    """How a program, or a job of several, ended."""

    statuses: list[int]
    """Exit status of each rank, negative for a signal."""

    stdout: str
    stderr: str

    @property
    def status(self) -> int:
        """The status of the first rank that failed, else 0."""
        return next((status for status in self.statuses if status), 0)


def run_program(*arguments: object, folder: Path = ROOT, environment: Mapping[str, str] | None = None) -> Ended:
    """What ``python *arguments`` does in ``folder``: ``-m module``, ``-c program`` or a script, and what it is given.

    Args:
        arguments: of the interpreter; no other options of its own.
        folder: where it runs.
        environment: all variables; default: this process's.
    """
    return _run([dict(os.environ if environment is None else environment)], arguments, folder)


def run_ranks(
    num_ranks: int, *arguments: object, folder: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Ended:
    """:func:`run_program` on ranks that find each other by the variables that torchrun sets."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job = dict(os.environ if environment is None else environment) | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    ranks = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return _run(ranks, arguments, folder)


def _run(environments: list[dict[str, str]], arguments: tuple[object, ...], folder: Path) -> Ended:
    with tempfile.TemporaryDirectory() as files:
        output, errors = Path(files, "output"), Path(files, "errors")
        program = {"arguments": [str(word) for word in arguments], "folder": str(folder)}
        program |= {"output": str(output), "errors": str(errors)}
        programs = [program | {"environment": environment} for environment in environments]
        statuses = _ask({"programs": programs, "timeout_s": TIMEOUT_S})
        return Ended(statuses, output.read_text(), errors.read_text())


def _ask(job: dict) -> list[int]:
    server = _server()
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "The program server has ended. To see why: python -m tests.program_server"
    return json.loads(answer)


@functools.cache
def _server() -> subprocess.Popen[str]:
    # torch reads both while it is imported, before a program's own can count.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.program_server"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(server.stdin.close)
    return server
