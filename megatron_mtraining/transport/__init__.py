"""Communication between ranks, over process groups. The only importer of torch.distributed beside commands."""

from .base import Group, Pending, SoloTransport, Transport
from .groups import (
    Groups,
    RingGroups,
    RingTransports,
    as_ring_groups,
    as_transport,
    create_ring_groups,
    destroy_ring_groups,
    inner_and_outer_ranks,
    resolve_transports,
)

__all__ = [
    "Group",
    "Groups",
    "Pending",
    "RingGroups",
    "RingTransports",
    "SoloTransport",
    "Transport",
    "as_ring_groups",
    "as_transport",
    "create_ring_groups",
    "destroy_ring_groups",
    "inner_and_outer_ranks",
    "resolve_transports",
]
