"""A script's command line before any parser reads it: its choice of this backend, and the command that starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import zip_longest

from .report import PROGRAM

_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
_OF_A_JOB = ("MASTER_ADDR", "RANK", "WORLD_SIZE")


def chooses(arguments: Sequence[str]) -> bool:
    """Return whether the flags of a script ask for this backend."""
    return _value_of("--attention-backend", arguments) == "mtraining"


def start_command(argv: Sequence[str]) -> str:
    """Return the command that starts a script and its flags on ranks, as few as its parallel sizes ask for."""
    num_ranks = 1
    for flag in _SIZES:
        size = _value_of(flag, argv[1:]) or "1"
        num_ranks *= max(int(size), 1) if size.isdecimal() else 1
    return f"torchrun --nproc-per-node {num_ranks} -m megatron_mtraining {argv[0]} and its flags"


def say_how_to_start(argv: Sequence[str]) -> None:
    """Print, where nothing started this process as a rank, what would; a script may make its own process group."""
    if chooses(argv[1:]) and not any(name in os.environ for name in _OF_A_JOB):
        sentence = "this is no rank of a job. Unless the script makes a process group itself, start it with"
        print(f"{PROGRAM}: {sentence} {start_command(argv)}.", file=sys.stderr, flush=True)


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    found = None
    for word, following in zip_longest(arguments, arguments[1:]):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found
