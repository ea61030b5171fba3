"""Placement of ranks in groups and on hosts: what the ring's levels are cut by."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ..errors import RankMismatchError

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
        """Return the most neighbours that can form an inner ring without one leaving its host, in every group alike."""
        runs = (groupby(self.hosts[rank] for rank in ranks) for ranks in self.rank_lists)
        return math.gcd(*(len(list(members)) for group_runs in runs for _, members in group_runs))


def gather_placement(group: ProcessGroup, *, plan: str) -> Placement:
    """Gather every rank's ``group`` and host name. A collective over all ranks.

    Args:
        group: this rank's context-parallel group.
        plan: in words, what all ranks must mean to do with the answer.

    Raises:
        RankMismatchError: plans differ; the groups made from different ones would wait for each other for ever.
    """
    import torch.distributed as dist

    answers: list[tuple[tuple[int, ...], str, str]] = [((), "", "")] * dist.get_world_size()
    dist.all_gather_object(answers, (tuple(dist.get_process_group_ranks(group)), socket.gethostname(), plan))
    others = [rank for rank, (_, _, other) in enumerate(answers) if other != plan]
    if others:
        raise RankMismatchError(
            f"The arguments must be the same on every rank, got {plan} on rank {dist.get_rank()} "
            f"and {answers[others[0]][2]} on {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}."
        )
    ranks_and_hosts = [(ranks, host) for ranks, host, _ in answers]
    return Placement(
        rank_lists=tuple(sorted({ranks for ranks, _ in ranks_and_hosts}, key=min)),
        hosts=tuple(host for _, host in ranks_and_hosts),
    )
