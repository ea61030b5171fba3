"""Messages of the launcher and the choice of the backend: what is needed before Megatron is imported, and after."""

from __future__ import annotations

import functools
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NoReturn

from ..arguments import config_from_args
from ..config import MTrainingConfig
from ..config_file import config_from_environment
from ..ranks import is_first_rank, is_first_rank_of_host

PROGRAM = "mtraining"
BACKEND = "mtraining"
"""Choice of ``--attention-backend`` that asks for this attention."""

_FIRST_RANK_SPEAKS_WITHIN_S = 10.0
"""Seconds that the other ranks of its host wait before they end: torchrun then ends all, spoken or not."""
_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
_OF_A_JOB = ("MASTER_ADDR", "RANK", "WORLD_SIZE")


@functools.cache
def say_once(sentence: str) -> None:
    """Print ``sentence`` on the first rank, once in the life of the process."""
    if is_first_rank():
        print(f"{PROGRAM}: {sentence}", flush=True)


def end_with(error: object) -> NoReturn:
    """End the process with status 2 and one sentence for each host: what the user must change."""
    if not is_first_rank_of_host():  # which says it and ends them, unless it alone has nothing to say
        time.sleep(_FIRST_RANK_SPEAKS_WITHIN_S)
    print(f"{PROGRAM}: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def say_how_to_start(argv: Sequence[str]) -> None:
    """Print, where nothing started this process as a rank, what would; a script may make its own process group."""
    if chooses(argv[1:]) and not any(name in os.environ for name in _OF_A_JOB):
        sentence = "this is no rank of a job. Unless the script makes a process group itself, start it with"
        print(f"{PROGRAM}: {sentence} {start_command(argv)}.", file=sys.stderr, flush=True)


def chooses(arguments: Sequence[str]) -> bool:
    """Return whether the flags of a script ask for this backend."""
    return _value_of("--attention-backend", arguments) == BACKEND


def start_command(argv: Sequence[str]) -> str:
    """Return the command that starts a script and its flags on ranks, as few as its parallel sizes ask for."""
    num_ranks = 1
    for flag in _SIZES:
        size = _value_of(flag, argv[1:]) or "1"
        num_ranks *= max(int(size), 1) if size.isdecimal() else 1
    return f"torchrun --nproc-per-node {num_ranks} -m megatron_mtraining {argv[0]} and its flags"


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    found = None
    for word, following in zip_longest(arguments, arguments[1:]):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found


class UsageError(ValueError):
    """Error for a request that cannot be met; the launcher shows the message alone."""


@dataclass(slots=True)
class Settings:
    """The choice, as far as it is known; one for the process."""

    given: MTrainingConfig | None = None
    """Configuration that a program passed to :func:`megatron_mtraining.launch.hooks.install`."""

    args: Namespace | None = None
    """Megatron's arguments, once they are validated and choose this backend."""

    flags: dict[str, str] = field(default_factory=dict)
    """Megatron's flags as they are typed, by the names that their values have in its arguments."""

    model_built: bool = False
    """True if a model with this attention was built, or a pipeline stage of one."""

    def defaults(self) -> MTrainingConfig:
        """Return the configuration before any flag is read: the given one, else that of ``MTRAINING_CONFIG``."""
        return self.given or config_from_environment()

    def config(self) -> MTrainingConfig:
        """Return the configuration that attention shall run with.

        Raises:
            ValueError: a value out of its range.
        """
        return self.defaults() if self.args is None else config_from_args(self.args)


SETTINGS = Settings()
