"""Rank of this process by its environment: the one that reports for all of them, and for its host."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """True on the rank that reports for all; torchrun, Slurm's wrappers and Megatron itself set or read ``RANK``."""
    return os.environ.get("RANK", "0") == "0"


def is_first_rank_of_host() -> bool:
    """True on the rank that reports for its host."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
