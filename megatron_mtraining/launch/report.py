"""What the launcher says, once and on one rank."""

from __future__ import annotations

import functools

from ..job import is_first_rank


@functools.cache
def say_once(sentence: str) -> None:
    """Prints ``sentence`` on the first rank, once in the life of the process."""
    if is_first_rank():
        print(f"mtraining: {sentence}", flush=True)
