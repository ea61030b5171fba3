"""Messages of the launcher: once on the first rank, and once a host where it ends the run."""

from __future__ import annotations

import functools
import sys
import time
from typing import NoReturn

from ..job import is_first_rank, is_first_rank_of_host

PROGRAM = "mtraining"
_FIRST_RANK_SPEAKS_WITHIN_S = 10.0
"""Seconds that the other ranks of its host wait before they end: torchrun then ends all, spoken or not."""


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
