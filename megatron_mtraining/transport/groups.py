"""The communicators of a ring: which ranks form its inner and outer levels, and their process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import as_integer, invalid
from .base import Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGroups:
    """One rank's groups for a hierarchical ring. Keys and gradients have their own, or one queues behind the other."""

    inner: Group
    """The ranks of this node: neighbours in the context-parallel group."""

    outer: Group
    """The ranks that hold this rank's place in every node."""

    inner_gradient: Group
    """The members of ``inner``, for gradients."""

    outer_gradient: Group
    """The members of ``outer``, for gradients."""


def inner_and_outer_ranks(cp_ranks: Sequence[int], *, inner_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Cuts one context-parallel group into inner rings of neighbours and outer rings of stride ``inner_size``.

    The order is the one in which Megatron's own hierarchical groups are made: level 0 is contiguous in the group.

    Raises:
        ValueError: ``inner_size`` does not divide the group.
    """
    ranks = list(cp_ranks)
    remedy = "Give the number of context-parallel ranks in one node."
    rule = f"a divisor of the context-parallel size {len(ranks)}"
    inner_size = as_integer("inner_size", inner_size, least=1, rule=rule, remedy=remedy)
    if len(ranks) % inner_size:
        raise invalid("inner_size", rule, inner_size, remedy)
    inner = [ranks[start : start + inner_size] for start in range(0, len(ranks), inner_size)]
    outer = [ranks[place::inner_size] for place in range(inner_size)]
    return inner, outer


def create_ring_groups(
    cp_rank_lists: Sequence[Sequence[int]],
    *,
    inner_size: int,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> RingGroups | None:
    """Creates the inner, outer and gradient groups of every context-parallel group of the job.

    A collective over all ranks of the job, members or not: call it once, after the job's own groups were made, with the
    same arguments everywhere.

    Args:
        cp_rank_lists: global ranks of each context-parallel group, ascending, as torch numbers a group's members.
        inner_size: context-parallel ranks in one node.
        timeout: of the groups made; default the job's.
        backend: of the groups made; default the job's.

    Returns:
        This rank's groups, or None when no list holds this rank.

    Raises:
        ValueError: ``inner_size`` does not divide a group, or a list is not ascending, or a rank is listed twice or
            is not in the job.
    """
    import torch.distributed as dist

    _check_rank_lists(cp_rank_lists, world_size=dist.get_world_size())
    levels = [inner_and_outer_ranks(ranks, inner_size=inner_size) for ranks in cp_rank_lists]

    inner = [ranks for lists, _ in levels for ranks in lists]
    outer = [ranks for _, lists in levels for ranks in lists]
    own = {}
    for name, lists in (("inner", inner), ("outer", outer), ("inner_gradient", inner), ("outer_gradient", outer)):
        for ranks in lists:
            group = dist.new_group(
                ranks,
                timeout=timeout,
                backend=backend,
                pg_options=_options(backend, timeout),
                group_desc=f"mtraining_{name}",
            )
            if dist.get_rank() in ranks:
                own[name] = group
                _connect(group)
    return RingGroups(**own) if own else None


def _options(backend: str | None, timeout: timedelta | None) -> Any:
    """Of an NCCL group: a stream whose transfers start before the kernels of a computation that fills the GPU."""
    import torch.distributed as dist

    if (backend or dist.get_backend()) != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if timeout is not None:
        options._timeout = timeout
    return options


def _connect(group: ProcessGroup) -> None:
    """Has NCCL make its communicator, with all its memory, now and not in the first step."""
    import torch
    import torch.distributed as dist

    if dist.get_backend(group) == "nccl" and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def destroy_ring_groups(groups: RingGroups) -> None:
    """Ends what :func:`create_ring_groups` made for this rank, its communicators and their memory.

    Every rank of a group calls it, when nothing is under way in one. Groups that ended with the job's own, and
    transports, which are the caller's, are left alone.
    """
    import torch.distributed as dist

    for group in (groups.inner, groups.outer, groups.inner_gradient, groups.outer_gradient):
        if isinstance(group, dist.ProcessGroup):
            # torch forgets every group with the job's own, and then does not know this one.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def _check_rank_lists(cp_rank_lists: Sequence[Sequence[int]], *, world_size: int) -> None:
    listed: set[int] = set()
    for ranks in cp_rank_lists:
        if list(ranks) != sorted(ranks):  # torch numbers the members of a group by ascending global rank
            raise invalid("cp_rank_lists", "lists in ascending order", list(ranks))
        for rank in ranks:
            as_integer("a rank of cp_rank_lists", rank, least=0)
            if rank in listed:
                raise invalid("cp_rank_lists", "lists that name each rank once", f"rank {rank} twice")
            if not 0 <= rank < world_size:
                raise invalid("cp_rank_lists", f"lists of ranks of this job, 0 to {world_size - 1}", f"rank {rank}")
            listed.add(rank)
