"""Transport of a group; the same one in every call."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import invalid
from .base import Group, SoloTransport, Transport


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
