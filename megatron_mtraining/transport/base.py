"""Interface that selection and ring attention talk to, and the group of one that needs no wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..errors import invalid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

REDUCTIONS = ("sum", "max")
HALF_DTYPES = (torch.float16, torch.bfloat16)
"""Floats that are summed as float32 wherever the sum is taken here."""


class Pending(Protocol):
    """A transfer that was posted and may still be in flight."""

    def wait(self) -> Tensor:
        """Return the received tensor, safe to read on the current stream. Never blocks the host on a CUDA stream."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's end of one group. Every rank of the group makes the same calls in the same order.

    Inputs are left unchanged unless a method documents otherwise, and what is returned shares no memory with them. The
    tensor of a posted transfer must not be written before ``wait`` has returned, nor read where it is changed in place.
    """

    rank: int
    """This rank's number inside the group."""

    size: int
    """Ranks in the group."""

    global_ranks: tuple[int, ...]
    """The group's members as the whole job numbers them: torch.distributed's ranks, and names for error messages."""

    def check_device(self, device: torch.device) -> None:
        """Refuse memory that the group cannot send from. Communicates nothing."""
        ...

    def exchange(self, tensor: Tensor) -> Pending:
        """Post ``tensor`` to rank + 1; one of the same shape and dtype comes from rank - 1, cyclically."""
        ...

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Compute the ``sum`` or ``max`` of every rank's ``tensor``, in place."""
        ...

    def assemble(self, tensor: Tensor) -> Tensor:
        """Join parts bit for bit, in place: each element must be all zero bits on every rank but at most one."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather every rank's ``tensor``: ``[size, *tensor.shape]``."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Exchange ``[size, *shape]``, entry i meant for rank i, for ``[size, *shape]``, entry i come from rank i."""
        ...

    def post_all_reduce(self, tensor: Tensor) -> Pending:
        """Post what :meth:`all_reduce` does by ``sum``; computation continues beside it."""
        ...

    def post_all_gather(self, tensor: Tensor) -> Pending:
        """Post what :meth:`all_gather` does."""
        ...

    def post_reduce_scatter(self, tensor: Tensor) -> Pending:
        """Post, from ``[size, *shape]`` on every rank, the sum of the entries meant for this one: ``[*shape]``."""
        ...


Group: TypeAlias = "ProcessGroup | Transport"
"""Group that callers may pass; :func:`megatron_mtraining.transport.as_transport` gives its transport."""


class Received(NamedTuple):
    """Transfer that has already ended."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """Return the received tensor."""
        return self.tensor


class PostsAtOnce:
    """Posted collectives of a transport that has nothing to do beside them: they end before they are waited for.

    It is one without a wire, too, and sends from any memory.
    """

    def check_device(self, device: torch.device) -> None:
        """Accept any device."""

    def post_all_reduce(self, tensor: Tensor) -> Received:
        """Compute the sum of every rank's ``tensor``, in place."""
        return Received(self.all_reduce(tensor))

    def post_all_gather(self, tensor: Tensor) -> Received:
        """Gather every rank's ``tensor``: ``[size, *tensor.shape]``."""
        return Received(self.all_gather(tensor))


class SoloTransport(PostsAtOnce):
    """A group of one rank: every operation is answered from its input, nothing is sent."""

    rank = 0
    size = 1

    def __init__(self, global_rank: int = 0) -> None:
        self.global_ranks = (global_rank,)

    def exchange(self, tensor: Tensor) -> Received:
        """Return a copy of ``tensor``: rank - 1 and rank + 1 are this rank."""
        return Received(tensor.clone())

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Return ``tensor`` itself."""
        check_reduction(op)
        return tensor

    def assemble(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` itself."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return ``[1, *tensor.shape]``, a copy."""
        return tensor.unsqueeze(0).clone()

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor``."""
        check_one_entry_per_rank(tensor, self.size)
        return tensor.clone()

    def post_reduce_scatter(self, tensor: Tensor) -> Received:
        """Return the only entry of ``[1, *shape]``, a copy."""
        check_one_entry_per_rank(tensor, self.size)
        return Received(tensor[0].clone())


def check_reduction(op: str) -> None:
    """Refuse a reduction that is not one of ``REDUCTIONS``."""
    if op not in REDUCTIONS:
        raise invalid("op", f"one of {', '.join(REDUCTIONS)}", repr(op))


def check_one_entry_per_rank(tensor: Tensor, size: int) -> None:
    """Refuse a tensor whose leading dimension does not hold one entry for each rank of the group."""
    if tensor.dim() == 0 or tensor.shape[0] != size:
        raise invalid("tensor", f"of shape [{size}, ...], one entry for each rank", tuple(tensor.shape))
