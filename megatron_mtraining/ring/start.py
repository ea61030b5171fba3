"""The start of a ring before anybody knows what is kept: keys set off while the index is still being chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import invalid
from ..tensors import check_tensor
from ..transport import Group, Transport, as_transport
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
        self._groups = groups
        self._given: tuple[Tensor, Tensor] | None = (key, value)
        self._posted_versions: tuple[int | None, ...] | None = None
        self._departure: Departure | None = None

    @property
    def is_posted(self) -> bool:
        """Whether the first transfers have been posted."""
        return self._posted_versions is not None

    @torch.no_grad()
    def post(self) -> None:
        """Posts the first transfers. A collective over the groups: every rank calls it, or none does.

        Key and value must not be written to before the call of ``ring_attention`` that goes on from it.

        Raises:
            ValueError: it was called before, or a call has gone on from this start.
        """
        if self._given is None or self.is_posted:
            got = "one that a call has used" if self._given is None else "one that was posted before"
            raise invalid("start", "posted once, before ring_attention takes it", got)
        self._posted_versions = _versions(*self._given)
        self._departure = depart(*self._given, self.schedule, self.rings)

    def check_is_of(
        self, key: Tensor, value: Tensor, *, cp_group: Transport, schedule: str, **groups: Group | None
    ) -> None:
        """Refuses a call with other arguments than it was made of.

        Raises:
            ValueError: they are others; a call has gone on from it; key or value were written to since they set off, of
                which other ranks have what was there before.
        """
        own_key, own_value = self._given or (None, None)
        is_alike = key is own_key and value is own_value and schedule == self.schedule.kind
        is_alike &= cp_group is self.rings.cp and all(self._groups.get(name) is groups[name] for name in groups)
        if not is_alike:
            rule = "made of the key, value, groups and schedule of this call, and of no other call"
            raise invalid("start", rule, "another one")
        if self._posted_versions not in (None, _versions(*self._given)):
            raise invalid("key and value", "left as they were when start.post sent them", "written to since")

    def take(self) -> Departure | None:
        """What :meth:`post` posted, if it was called; for one call only."""
        departure, self._departure = self._departure, None
        self._given = None
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
        schedule: see ``cp_group``. ``ring_attention`` compares it over the ranks, after the keys have set off.
        groups: see ``cp_group``: inner and outer ones, for keys and for gradients, by their names there.

    Raises:
        ValueError: the groups do not fit together, or the value does not fit the key; the other ranks of ``cp_group``
            learn of it.
    """
    cp = as_transport(cp_group)
    with announcing_refusal(cp, key, value):
        check_tensor("key", key)
        check_tensor("value", value)
        if value.shape != key.shape:
            raise invalid("value.shape", f"{tuple(key.shape)} as key has", tuple(value.shape))
        if (value.dtype, value.device) != (key.dtype, key.device):
            raise invalid("value", f"of {key.dtype} on {key.device} as key is", f"{value.dtype} on {value.device}")
        return RingStart(key, value, cp_group=cp, schedule=schedule, **groups)


def _versions(*tensors: Tensor) -> tuple[int | None, ...]:
    """How often each was written to; None where torch does not count, in inference mode."""
    return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)
