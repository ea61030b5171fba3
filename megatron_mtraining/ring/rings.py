"""Which communicator carries what: the context-parallel group, the two levels of the ring, and gradients apart."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import invalid
from ..transport import Group, SoloTransport, Transport, as_transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """This rank's end of every group that a call communicates in."""

    cp: Transport
    """The whole context-parallel group: the plan's digest and the packed verticals."""

    inner: Transport
    """Keys inside a node."""

    outer: Transport
    """Keys between nodes."""

    inner_gradient: Transport
    """Gradients inside a node."""

    outer_gradient: Transport
    """Gradients between nodes."""


def resolve_rings(
    schedule: str,
    *,
    cp_group: Group,
    inner_group: Group | None = None,
    outer_group: Group | None = None,
    inner_gradient_group: Group | None = None,
    outer_gradient_group: Group | None = None,
) -> Rings:
    """The transports of a call, checked to fit together. Communicates nothing.

    Without inner and outer groups the whole context-parallel group is one node. Without gradient groups, gradients
    share those of the keys.

    ``flat`` always sees one node, so that a caller may make the groups of a hierarchical ring and pass them whatever
    the schedule: ``inner_group`` and ``outer_group`` go unused, and so do gradient groups, except an
    ``inner_gradient_group`` of all ranks of ``cp_group``.

    Raises:
        ValueError: inner and outer groups that do not factor ``cp_group`` as neighbours and strides, or a gradient
            group whose members are not those of its counterpart.
    """
    cp = as_transport(cp_group)
    solo = SoloTransport(cp.global_ranks[cp.rank])
    if schedule == "flat":
        gradient = None if inner_gradient_group is None else as_transport(inner_gradient_group)
        if gradient is None or gradient.global_ranks != cp.global_ranks:
            gradient = cp
        return Rings(cp=cp, inner=cp, outer=solo, inner_gradient=gradient, outer_gradient=solo)

    if inner_group is None and outer_group is None:
        inner_group = cp
    inner = solo if inner_group is None else as_transport(inner_group)
    outer = solo if outer_group is None else as_transport(outer_group)
    _check_factors(cp, inner, outer)
    return Rings(
        cp=cp,
        inner=inner,
        outer=outer,
        inner_gradient=_counterpart("inner", inner, inner_gradient_group),
        outer_gradient=_counterpart("outer", outer, outer_gradient_group),
    )


def _check_factors(cp: Transport, inner: Transport, outer: Transport) -> None:
    if inner.size * outer.size != cp.size:
        raise invalid(
            "inner_group and outer_group",
            f"of sizes whose product is the size {cp.size} of cp_group",
            f"{inner.size} and {outer.size}",
            "Create them with megatron_mtraining.transport.create_ring_groups.",
        )
    node, place = divmod(cp.rank, inner.size)
    neighbours = cp.global_ranks[node * inner.size : (node + 1) * inner.size]
    strided = cp.global_ranks[place :: inner.size]
    for name, group, expected in (("inner_group", inner, neighbours), ("outer_group", outer, strided)):
        if group.global_ranks != expected:
            raise invalid(name, f"the group of ranks {expected} of cp_group", f"that of ranks {group.global_ranks}")


def _counterpart(name: str, keys: Transport, gradient_group: Group | None) -> Transport:
    if gradient_group is None or keys.size == 1:
        return keys
    gradient = as_transport(gradient_group)
    if gradient.global_ranks != keys.global_ranks:
        raise invalid(
            f"{name}_gradient_group",
            f"of the ranks {keys.global_ranks} of {name}_group",
            f"of ranks {gradient.global_ranks}",
        )
    return gradient
