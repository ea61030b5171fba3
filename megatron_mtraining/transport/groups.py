"""Groups of a call: the transport of each, the ranks of the ring's inner and outer levels, and their placement."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ..errors import RankMismatchError, as_integer, invalid
from .base import Group, SoloTransport, Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGroups:
    """One rank's groups for a ring: process groups, or transports of the rank simulator.

    Without inner and outer groups the whole context-parallel group is one node. Without gradient groups, gradients
    share those of the keys and may queue behind them. The ``flat`` schedule uses ``cp`` alone, and for gradients an
    ``inner_gradient`` of all ranks of ``cp``.
    """

    cp: Group
    """All context-parallel ranks."""

    inner: Group | None = None
    """The ranks of this node: neighbours in ``cp``."""

    outer: Group | None = None
    """Ranks with this rank's index in every node."""

    inner_gradient: Group | None = None
    """The members of ``inner``, for gradients."""

    outer_gradient: Group | None = None
    """The members of ``outer``, for gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTransports:
    """Transports of one call, by role; groups of one rank where a role has nothing to send."""

    cp: Transport
    inner: Transport
    outer: Transport
    inner_gradient: Transport
    outer_gradient: Transport


Groups: TypeAlias = "RingGroups | Group | DeviceMesh"
"""Groups that callers of attention may pass."""


def as_ring_groups(groups: Groups | None) -> RingGroups:
    """Return the groups of a call.

    Args:
        groups: :class:`RingGroups`; a process group or transport, which is one node; a mesh of dimensions (outer,
            inner), whose flattened group is created by the first call, a collective; None for one device.

    Raises:
        ValueError: a mesh of other than two dimensions, without names or with ranks out of order, or another kind of
            object. The other ranks do not learn of it: no group is known.
    """
    if isinstance(groups, RingGroups):
        return groups
    if groups is None:
        return RingGroups(cp=SoloTransport())
    if torch.distributed.is_available() and isinstance(groups, torch.distributed.device_mesh.DeviceMesh):
        if groups.ndim != 2 or not groups.mesh_dim_names:
            given = f"{groups.ndim} dimensions {groups.mesh_dim_names or 'without names'}"
            raise invalid("groups", "a DeviceMesh of two named dimensions, (outer, inner)", given)
        ranks = groups.mesh.flatten()
        if not bool((ranks[1:] > ranks[:-1]).all()):  # the rank in a process group is the place in ascending order
            raise invalid("groups", "a DeviceMesh of ascending ranks", ranks.tolist())
        outer, inner = (groups.get_group(axis) for axis in range(2))
        return RingGroups(cp=groups._flatten().get_group(), inner=inner, outer=outer)  # created once
    return RingGroups(cp=as_transport(groups))


def resolve_transports(groups: RingGroups, schedule: str) -> RingTransports:
    """Return the transports of a call, checked to fit together. Communicates nothing.

    Raises:
        ValueError: inner and outer groups that do not factor ``cp`` as neighbours and strides, or a gradient group
            whose members are not those of its counterpart.
    """
    cp = as_transport(groups.cp)
    solo = SoloTransport(cp.global_ranks[cp.rank])
    if schedule == "flat":
        gradient = None if groups.inner_gradient is None else as_transport(groups.inner_gradient)
        if gradient is None or gradient.global_ranks != cp.global_ranks:
            gradient = cp
        return RingTransports(cp=cp, inner=cp, outer=solo, inner_gradient=gradient, outer_gradient=solo)
    inner, outer = groups.inner, groups.outer
    if inner is None and outer is None:
        inner = cp
    inner, outer = (solo if group is None else as_transport(group) for group in (inner, outer))
    _check_factors(cp, inner, outer)
    return RingTransports(
        cp=cp,
        inner=inner,
        outer=outer,
        inner_gradient=_counterpart("inner", inner, groups.inner_gradient),
        outer_gradient=_counterpart("outer", outer, groups.outer_gradient),
    )


def _check_factors(cp: Transport, inner: Transport, outer: Transport) -> None:
    if inner.size * outer.size != cp.size:
        raise invalid(
            "groups.inner and groups.outer",
            f"of sizes whose product is the size {cp.size} of groups.cp",
            f"{inner.size} and {outer.size}",
            "Create them with megatron_mtraining.transport.create_ring_groups.",
        )
    node, local_rank = divmod(cp.rank, inner.size)
    neighbours = cp.global_ranks[node * inner.size : (node + 1) * inner.size]
    strided = cp.global_ranks[local_rank :: inner.size]
    for name, group, expected in (("inner", inner, neighbours), ("outer", outer, strided)):
        if group.global_ranks != expected:
            raise invalid(
                f"groups.{name}", f"the group of ranks {expected} of groups.cp", f"that of ranks {group.global_ranks}"
            )


def _counterpart(name: str, keys: Transport, gradient_group: Group | None) -> Transport:
    if gradient_group is None or keys.size == 1:
        return keys
    gradient = as_transport(gradient_group)
    if gradient.global_ranks != keys.global_ranks:
        raise invalid(
            f"groups.{name}_gradient",
            f"of the ranks {keys.global_ranks} of groups.{name}",
            f"of ranks {gradient.global_ranks}",
        )
    return gradient


def inner_and_outer_ranks(cp_ranks: Sequence[int], *, inner_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Cut one context-parallel group into inner rings of neighbours and outer rings of stride ``inner_size``.

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
    outer = [ranks[index::inner_size] for index in range(inner_size)]
    return inner, outer


def create_ring_groups(
    cp_rank_lists: Sequence[Sequence[int]], *, inner_size: int, cp_group: ProcessGroup | None = None
) -> RingGroups | None:
    """Create the inner, outer and gradient groups of every context-parallel group of the job.

    A collective over all ranks of the job, members or not: call it once, after the job's own groups were made, with the
    same arguments everywhere.

    Args:
        cp_rank_lists: global ranks of each context-parallel group, ascending, as torch numbers a group's members.
        inner_size: context-parallel ranks in one node.
        cp_group: this rank's context-parallel group, whose timeout the new groups have; default the whole job.

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
    own, timeout = {}, _timeout_of(cp_group or dist.group.WORLD)
    for name, lists in (("inner", inner), ("outer", outer), ("inner_gradient", inner), ("outer_gradient", outer)):
        for ranks in lists:
            group = dist.new_group(ranks, timeout=timeout, pg_options=_options(timeout), group_desc=f"mtraining_{name}")
            if dist.get_rank() in ranks:
                own[name] = group
                _connect(group)
    return RingGroups(cp=cp_group or dist.group.WORLD, **own) if own else None


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return the timeout of a group; None, which is torch's default, where its backend has no options.

    A new group has torch's default, whatever the timeout of the job is.
    """
    device = "cuda" if "nccl" in torch.distributed.get_backend(group) else "cpu"
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    return getattr(options, "_timeout", None)


def _options(timeout: timedelta | None) -> Any:
    """Return the options of an NCCL group: transfers of its stream start before kernels that fill the GPU."""
    import torch.distributed as dist

    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if timeout is not None:
        options._timeout = timeout
    return options


def _connect(group: ProcessGroup) -> None:
    """Make NCCL create its communicator, with all its memory, now and not in the first step."""
    import torch.distributed as dist

    if dist.get_backend(group) == "nccl" and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def destroy_ring_groups(groups: RingGroups) -> None:
    """Destroy what :func:`create_ring_groups` made for this rank, its communicators and their memory.

    Every rank of a group calls it, when nothing is in flight in one. Groups that ended with the default group, and
    transports, which are the caller's, are left alone.
    """
    for group in (groups.inner, groups.outer, groups.inner_gradient, groups.outer_gradient):
        if torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
            # torch forgets every group with the default one, this one too.
            with contextlib.suppress(ValueError):
                torch.distributed.destroy_process_group(group)


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


def as_transport(group: Group) -> Transport:
    """Return this rank's end of ``group``; the same one in every call.

    Args:
        group: a torch process group, or anything that already satisfies :class:`Transport`, which is returned as it is.

    Raises:
        ValueError: ``group`` is neither, or this rank does not belong to it.
    """
    if torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
        if group not in _transports:
            _transports[group] = _transport_over(group)
        return _transports[group]
    if type(group) in _transport_kinds:
        return group
    if isinstance(group, Transport):
        _transport_kinds.add(type(group))
        return group
    raise invalid("group", "a torch process group that this rank belongs to, or a Transport", repr(group))


_transports: WeakKeyDictionary[Any, Transport] = WeakKeyDictionary()
"""Transport of each group; it holds its group weakly too, so that a destroyed one ends with its communicator."""


_transport_kinds: set[type] = set()
"""Classes whose objects were seen to be transports: looking for every method again takes as long as a collective."""


def _transport_over(group: Any) -> Transport:
    from .process_group import ProcessGroupTransport

    transport = ProcessGroupTransport(group)
    return transport if transport.size > 1 else SoloTransport(transport.global_ranks[0])


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
