"""Which ranks form which groups, and which of them share a host: what the ring's levels are cut by."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The context-parallel groups of a job and the host of every rank."""

    rank_lists: tuple[tuple[int, ...], ...]
    """Global ranks of each group, in the group's own order; the groups in the order of their first ranks."""

    hosts: tuple[str, ...]
    """Host of each global rank."""

    def inner_size(self) -> int:
        """The most neighbours that can form an inner ring without one leaving its host, in every group alike."""
        runs = (groupby(self.hosts[rank] for rank in ranks) for ranks in self.rank_lists)
        return math.gcd(*(len(list(members)) for group_runs in runs for _, members in group_runs))


def gather_placement(group: ProcessGroup) -> Placement:
    """What every rank of the job says of its own ``group`` and host. A collective over all ranks of the job."""
    import torch.distributed as dist

    answers: list[tuple[tuple[int, ...], str]] = [((), "")] * dist.get_world_size()
    dist.all_gather_object(answers, (tuple(dist.get_process_group_ranks(group)), socket.gethostname()))
    return Placement(
        rank_lists=tuple(sorted({ranks for ranks, _ in answers}, key=min)), hosts=tuple(host for _, host in answers)
    )
