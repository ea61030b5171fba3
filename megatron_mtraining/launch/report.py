"""What the launcher says, once and on one rank."""

from __future__ import annotations

import functools
import os


def is_first_rank() -> bool:
    """Whether this process speaks for the job; torchrun, Slurm's wrappers and Megatron itself go by ``RANK``."""
    return os.environ.get("RANK", "0") == "0"


def is_first_rank_of_host() -> bool:
    """Whether this process speaks for its host."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


@functools.cache
def say_once(sentence: str) -> None:
    """Prints ``sentence`` on the first rank, once in the life of the process."""
    if is_first_rank():
        print(f"mtraining: {sentence}", flush=True)
