"""Sizes that tests of layouts share."""

from __future__ import annotations


def node_size_of(cp_size: int) -> int:
    """Two nodes where the ranks divide into two, else one rank a node."""
    return cp_size // 2 if cp_size % 2 == 0 else 1
