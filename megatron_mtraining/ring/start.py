"""The start of a ring before anybody knows what is kept: keys set off while the index is still being chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from ..transport import Group, as_transport
from ..transport.agreement import announcing_refusal
from .circulate import Departure, depart
from .rings import resolve_rings
from .schedule import ring_schedule


class RingStart:
    """This rank's keys and values at the start of one call of :func:`megatron_mtraining.ring_attention`.

    Made by :func:`start_ring`, or by ``ring_attention`` itself.

    Raises:
        ValueError: the groups do not fit together.
    """

    def __init__(self, key: Tensor, value: Tensor, *, cp_group: Group, schedule: str, **groups: Group | None) -> None:
        rings = resolve_rings(schedule, cp_group=cp_group, **groups)
        self.rings = rings
        self.schedule = ring_schedule(
            schedule, cp_rank=rings.cp.rank, cp_size=rings.cp.size, inner_size=rings.inner.size
        )
        self._key, self._value = key, value
        self._departure: Departure | None = None

    @torch.no_grad()
    def post(self) -> None:
        """Posts the first transfers. A collective over the groups: every rank calls it, or none does."""
        self._departure = depart(self._key, self._value, self.schedule, self.rings)

    def is_of(self, key: Tensor, value: Tensor, schedule: str) -> bool:
        """Whether these are the tensors and the schedule that it was made for, and no call has gone on from it."""
        return key is self._key and value is self._value and schedule == self.schedule.kind

    def take(self) -> Departure | None:
        """What :meth:`post` posted, if it was called; for one call only."""
        departure, self._departure = self._departure, None
        self._key = self._value = None
        return departure


def start_ring(
    key: Tensor, value: Tensor, *, cp_group: Group, schedule: str = "hierarchical", **groups: Group | None
) -> RingStart:
    """What a layer hands to its selection, and then to ``ring_attention``, so that keys travel while it chooses: ::

        start = start_ring(key, value, cp_group=cp_group, schedule=schedule, inner_group=..., ...)
        index = select_vertical_slash(query, key, config, ..., meanwhile=start.post)
        ring_attention(query, key, value, index, ..., start=start)

    The selection calls ``post`` after all ranks have agreed on it, and so on the shapes of what travels.

    Args:
        key: ``[batch, local_len, num_kv_heads, head_dim]``, this rank's tokens.
        value: as ``key``.
        cp_group: as ``ring_attention`` takes it, and so the others.
        schedule: see ``cp_group``.
        groups: see ``cp_group``: inner and outer ones, for keys and for gradients, by their names there.

    Raises:
        ValueError: the groups do not fit together; the other ranks of ``cp_group`` learn of it.
    """
    cp = as_transport(cp_group)
    with announcing_refusal(cp, key.device):
        return RingStart(key, value, cp_group=cp, schedule=schedule, **groups)
