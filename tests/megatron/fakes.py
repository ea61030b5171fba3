"""Stand-ins for what a single test process does not have."""

from __future__ import annotations


class Group:
    """A process group as Megatron asks one: its size and this process's rank in it."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank
