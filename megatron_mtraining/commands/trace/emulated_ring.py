"""One rank of a large ring on the few ranks that are present: its launches and transfers, not its results.

Every rank present emulates one of the ring's: its groups have the ring's ranks, and their operations run between the
ranks present. Shapes, launches and the host's work are those of a rank of the large ring, and so are the bytes of
what takes long, exchanges and posted gathers. **The contents are not**: keys come from a neighbour instead of 31
others, a gather repeats the parts of few ranks, sums have no part of those that are missing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import invalid
from ...transport import (
    Group,
    Pending,
    RingGroups,
    SoloTransport,
    Transport,
    as_transport,
    create_ring_groups,
)
from ...transport.base import Received, check_one_entry_per_rank


def groups_of_present(num_present: int) -> RingGroups:
    """Create groups of all ranks of the job at every level, each with its own communicator. A collective over them."""
    everybody = [list(range(num_present))]
    node, line = (create_ring_groups(everybody, inner_size=size) for size in (num_present, 1))
    outer = {"outer": line.outer, "outer_gradient": line.outer_gradient}
    return RingGroups(cp=node.cp, inner=node.inner, inner_gradient=node.inner_gradient, **outer)


def groups_of_large_ring(present: RingGroups, *, size: int, inner_size: int) -> RingGroups:
    """Return the groups of the first ranks of a ring of ``size``, emulated on as many groups of the ranks present.

    Raises:
        ValueError: see :func:`check_can_play`.
    """
    cp = as_transport(present.cp)
    check_emulated(cp.size, size=size, inner_size=inner_size)
    rank = cp.rank
    node, slot = divmod(rank, inner_size)
    inner = tuple(range(node * inner_size, (node + 1) * inner_size))
    outer = tuple(range(slot, size, inner_size))
    members = {"cp": tuple(range(size)), "inner": inner, "outer": outer}
    members |= {"inner_gradient": inner, "outer_gradient": outer}
    return RingGroups(**{name: _emulated(getattr(present, name), rank, ranks) for name, ranks in members.items()})


def check_emulated(num_present: int, *, size: int, inner_size: int) -> None:
    """Check that the ranks present can emulate some of a ring of ``size``.

    Raises:
        ValueError: they do not divide a level of the ring, or ``inner_size`` the ring.
    """
    if inner_size < 1 or size % inner_size:
        raise invalid("inner_size", f"a divisor of the {size} ranks of the ring", inner_size)
    for ranks in (size, inner_size, size // inner_size):
        if ranks > 1:
            _check_divides(num_present, ranks)


def _check_divides(num_present: int, ranks: int) -> None:
    if ranks % num_present:
        raise invalid("the number of ranks present", f"a divisor of a group's {ranks}", num_present)


def _emulated(present: Group, global_rank: int, global_ranks: tuple[int, ...]) -> Transport:
    if len(global_ranks) == 1:
        return SoloTransport(global_rank)
    return EmulatedTransport(as_transport(present), rank=global_ranks.index(global_rank), global_ranks=global_ranks)


class EmulatedTransport:
    """A rank's end of a group, most of whose ranks are not there.

    With P of n ranks present:

    - an exchange goes to the next rank present; with one rank it is a copy;
    - a posted gather or reduce-scatter sends and receives what it does among n, n - 1 parts, in one operation between
      the ranks present: stand-ins of as many bytes, made of the first tensor of each shape;
    - what is not posted, small tables, is gathered among the ranks present and repeated;
    - an all-to-all sends the entries of n / P ranks to each rank present, an all-reduce sums over these: both move
      (P - 1) / P of what they move at most, instead of (n - 1) / n.

    Args:
        present: the group of the ranks present.
        rank: the emulated one's number in the group.
        global_ranks: the whole group's.

    Raises:
        ValueError: the ranks present are not a divisor of the group's.
    """

    def __init__(self, present: Transport, *, rank: int, global_ranks: tuple[int, ...]) -> None:
        self.rank, self.size, self.global_ranks = rank, len(global_ranks), global_ranks
        _check_divides(present.size, self.size)
        self._present = present
        self._substitutes: dict[tuple[object, ...], Tensor] = {}

    def check_device(self, device: torch.device) -> None:
        """Check the device of the ranks present."""
        self._present.check_device(device)

    def exchange(self, tensor: Tensor) -> Pending:
        """Post ``tensor`` to the next rank present; one like it comes from the one before."""
        return self._present.exchange(tensor)

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Reduce over the ranks present, in place."""
        return self._present.all_reduce(tensor, op=op)

    def assemble(self, tensor: Tensor) -> Tensor:
        """Join the parts of the ranks present, in place; those of others stay zero."""
        return self._present.assemble(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather ``[size, *tensor.shape]``: what the ranks present gave, over and over."""
        return self._repeated(self._present.all_gather(tensor))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Exchange ``[size, *shape]`` for ``[size, *shape]``: n / P entries for each rank present, and from it."""
        check_one_entry_per_rank(tensor, self.size)
        return self._present.all_to_all(tensor.unflatten(0, (self._present.size, -1))).flatten(0, 1)

    def post_all_reduce(self, tensor: Tensor) -> Pending:
        """Post what :meth:`all_reduce` does by ``sum``."""
        return self._present.post_all_reduce(tensor)

    def post_all_gather(self, tensor: Tensor) -> Pending:
        """Post a gather of as many bytes as that of ``[size, *tensor.shape]``, and give as many."""
        if self._present.size == 1:
            return Received(self._repeated(tensor[None]))
        if self._present.size == self.size:
            return self._present.post_all_gather(tensor)
        return _Gathered(self._present.post_all_gather(self._substitute(tensor, self._parts_sent)), self.size)

    def post_reduce_scatter(self, tensor: Tensor) -> Pending:
        """Post a reduce-scatter of as many bytes as that of ``[size, *shape]``, and give ``[*shape]``."""
        check_one_entry_per_rank(tensor, self.size)
        if self._present.size == 1:
            return Received(tensor[0].clone())
        if self._present.size == self.size:
            return self._present.post_reduce_scatter(tensor)
        sent = self._substitute(tensor[0], self._present.size * self._parts_sent)
        return _Scattered(self._present.post_reduce_scatter(sent.unflatten(0, (self._present.size, -1))))

    @property
    def _parts_sent(self) -> int:
        """Parts that a rank present sends to every other one, so that all of them are what one of n sends."""
        return -(-(self.size - 1) // (self._present.size - 1))

    def _repeated(self, parts: Tensor) -> Tensor:
        """Return ``[size, *shape]`` of what the ranks present gave."""
        return parts.repeat(self.size // len(parts), *[1] * (parts.dim() - 1))

    def _substitute(self, tensor: Tensor, count: int) -> Tensor:
        """Return ``[count, *tensor.shape]``, made once per shape: a launch for its making is none of the ring's."""
        key = (tensor.shape, tensor.dtype, count)
        if key not in self._substitutes:
            self._substitutes[key] = tensor.detach()[None].repeat(count, *[1] * tensor.dim())
        return self._substitutes[key]


class _Gathered(NamedTuple):
    """Parts of what was gathered, as many as the emulated group has ranks."""

    posted: Pending
    size: int

    def wait(self) -> Tensor:
        """Wait and return ``[size, *shape]``."""
        return self.posted.wait().flatten(0, 1)[: self.size]


class _Scattered(NamedTuple):
    """One part of what was reduced."""

    posted: Pending

    def wait(self) -> Tensor:
        """Wait and return ``[*shape]``."""
        return self.posted.wait()[0]
