"""Place of this process in its job, as the environment says: which one speaks for all of them."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """True if this process speaks for the job; torchrun, Slurm's wrappers and Megatron itself go by ``RANK``."""
    return os.environ.get("RANK", "0") == "0"


def is_first_rank_of_host() -> bool:
    """True if this process speaks for its host."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
