"""Runs Python programs as forks of itself, which holds the libraries that they start with: ``programs.py`` talks to it.

One request is one line of JSON, the programs of one job; the answer is the line of their exit statuses. A fork leaves
this program's loop and goes on to the end of the interpreter, as a program of its own: exceptions, exit handlers and
statuses are Python's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import site
import sys
from collections.abc import Sequence
from typing import Any

LIBRARIES = (
    *"torch torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.tensor torch.utils.data".split(),
    *"torch._dynamo torch._inductor.compile_fx numpy yaml einops omegaconf tests.frozen".split(),
)
"""Nine tenths of what Megatron imports, and nothing of Megatron or this package: a program finds its own of these."""

GRACE_S = 30
"""What torchrun gives the other ranks when one has failed."""


def serve() -> dict[str, Any] | None:
    """Answers requests until there are none; in a fork, returns the program to become."""
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    for line in sys.stdin:
        job = json.loads(line)
        ranks = []
        for program in job["programs"]:
            ranks.append(os.fork())
            if ranks[-1] == 0:
                return program
        print(json.dumps(statuses(ranks, job["timeout_s"])), flush=True)
    return None


def statuses(ranks: Sequence[int], timeout_s: int) -> list[int]:
    """Waits for processes and ends those that are left after a time, or some time after one has failed."""
    ended: dict[int, int] = {}

    def send(number: int) -> None:
        for rank in set(ranks) - set(ended):
            os.kill(rank, number)

    signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
    signal.alarm(timeout_s)
    while len(ended) < len(ranks):
        rank, status = os.wait()
        ended[rank] = os.waitstatus_to_exitcode(status)
        if ended[rank] and len(ended) < len(ranks):
            signal.alarm(GRACE_S)
            send(signal.SIGTERM)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return [ended[rank] for rank in ranks]


def become(arguments: list[str], folder: str, environment: dict[str, str], output: str, errors: str) -> None:
    """Does what ``python *arguments`` does in that folder and environment; output and errors go to the end of files."""
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, *rest = arguments
    first = {"-m": folder, "-c": ""}.get(kind, os.path.dirname(os.path.abspath(kind)))
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    installed = (sys.prefix, sys.base_prefix, site.getuserbase())
    sys.path[:] = [first, *given, *(path for path in sys.path if path.startswith(installed))]
    for own in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[own]
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    program = serve()
    if program:
        become(**program)
