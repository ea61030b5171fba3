"""Integers from one rank of a group to all others, from host to host: the sender does not wait for the receivers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MOST_IN_FLIGHT = 1024
"""Messages to each receiver that may wait for it; the next one waits for the oldest."""


class HostMessages:
    """One rank's end of a group whose first rank sends."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group, self._ranks = group, dist.get_process_group_ranks(group)
        self.is_source = dist.get_rank() == self._ranks[0]
        """True if this rank sends."""
        self._sent: deque[tuple[Any, Tensor]] = deque()

    @classmethod
    def among(cls, group: Any) -> HostMessages:
        """Connect the ranks of a process group over gloo. A collective over all ranks of the job.

        Args:
            group: this rank's; each rank of the job is in one group of the kind.
        """
        import torch.distributed as dist

        own = tuple(dist.get_process_group_ranks(group))
        lists: list[tuple[int, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(lists, own)
        groups = {ranks: dist.new_group(ranks, backend="gloo") for ranks in sorted(set(lists))}
        return cls(groups[own])

    def send(self, numbers: Sequence[int]) -> None:
        """Send ``numbers`` to all other ranks, which receive messages in the order in which they were sent."""
        import torch.distributed as dist

        parts = [torch.tensor(part, dtype=torch.int64, device="cpu") for part in ([len(numbers)], list(numbers))]
        for rank in self._ranks[1:]:
            for part in parts[: 2 if numbers else 1]:
                self._sent.append((dist.isend(part, rank, group=self._group), part))
        while len(self._sent) > _MOST_IN_FLIGHT * len(self._ranks):
            self._sent.popleft()[0].wait()

    def receive(self) -> list[int]:
        """Return the next message; wait until it is there."""
        length = self._take(1)[0]
        return self._take(length) if length else []

    def _take(self, length: int) -> list[int]:
        import torch.distributed as dist

        part = torch.zeros(length, dtype=torch.int64, device="cpu")
        dist.recv(part, self._ranks[0], group=self._group)
        return part.tolist()

    def destroy(self) -> None:
        """Destroy the group, when nothing is in flight in it."""
        import torch.distributed as dist

        with contextlib.suppress(ValueError):  # torch forgets every group with the default one
            dist.destroy_process_group(self._group)
