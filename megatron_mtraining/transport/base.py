"""The interface that selection and ring attention talk to, and the group of one that needs no wire."""

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
    """A transfer that was posted and may still be under way."""

    def wait(self) -> Tensor:
        """The received tensor, safe to read on the current stream. Never blocks the host on a CUDA stream."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's end of one group. Every rank of the group makes the same calls in the same order.

    Inputs are left unchanged unless a method says otherwise, and what is returned shares no memory with them. The
    tensor of a posted transfer must not be written before ``wait`` has returned, nor read where it is changed in place.
    """

    rank: int
    """This rank's number inside the group."""

    size: int
    """Ranks in the group."""

    global_ranks: tuple[int, ...]
    """The group's members as the whole job numbers them: torch.distributed's ranks, and names for error messages."""

    def check_device(self, device: torch.device) -> None:
        """Refuses memory that the group cannot send from. Communicates nothing."""
        ...

    def exchange(self, tensor: Tensor) -> Pending:
        """Posts ``tensor`` to rank + 1; one of the same shape and dtype comes from rank - 1, cyclically."""
        ...

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """The ``sum`` or ``max`` of every rank's ``tensor``, in place."""
        ...

    def assemble(self, tensor: Tensor) -> Tensor:
        """Joins parts bit for bit, in place: each element must be all zero bits on every rank but at most one."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[size, *tensor.shape]``: every rank's ``tensor``."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """From ``[size, *shape]`` on every rank, the sum of the entries meant for this one: ``[*shape]``."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """From ``[size, *shape]``, entry i meant for rank i: ``[size, *shape]``, entry i come from rank i."""
        ...

    def post_all_reduce(self, tensor: Tensor) -> Pending:
        """Posts what :meth:`all_reduce` does by ``sum``; computation goes on beside it."""
        ...

    def post_all_gather(self, tensor: Tensor) -> Pending:
        """Posts what :meth:`all_gather` does."""
        ...

    def post_reduce_scatter(self, tensor: Tensor) -> Pending:
        """Posts what :meth:`reduce_scatter` does."""
        ...


Group: TypeAlias = "ProcessGroup | Transport"
"""A group that callers may pass; :func:`megatron_mtraining.transport.as_transport` gives its transport."""


class Received(NamedTuple):
    """A transfer that has already ended."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """The received tensor."""
        return self.tensor


class PostsAtOnce:
    """Posted collectives of a transport that has nothing to do beside them: they end before they are waited for.

    It is one without a wire, too, and sends from any memory.
    """

    def check_device(self, device: torch.device) -> None:
        """Refuses none."""

    def post_all_reduce(self, tensor: Tensor) -> Received:
        """The sum of every rank's ``tensor``, in place."""
        return Received(self.all_reduce(tensor))

    def post_all_gather(self, tensor: Tensor) -> Received:
        """``[size, *tensor.shape]``: every rank's ``tensor``."""
        return Received(self.all_gather(tensor))

    def post_reduce_scatter(self, tensor: Tensor) -> Received:
        """From ``[size, *shape]`` on every rank, the sum of the entries meant for this one: ``[*shape]``."""
        return Received(self.reduce_scatter(tensor))


class SoloTransport(PostsAtOnce):
    """A group of one rank: every operation is answered from its input, nothing is sent."""

    rank = 0
    size = 1

    def __init__(self, global_rank: int = 0) -> None:
        self.global_ranks = (global_rank,)

    def exchange(self, tensor: Tensor) -> Received:
        """A copy of ``tensor``: rank - 1 and rank + 1 are this rank."""
        return Received(tensor.clone())

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """``tensor`` itself."""
        check_reduction(op)
        return tensor

    def assemble(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[1, *tensor.shape]``, a copy."""
        return tensor.unsqueeze(0).clone()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """The only entry of ``[1, *shape]``, a copy."""
        check_one_entry_per_rank(tensor, self.size)
        return tensor[0].clone()

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``."""
        check_one_entry_per_rank(tensor, self.size)
        return tensor.clone()


def check_reduction(op: str) -> None:
    """Refuses a reduction that is not one of ``REDUCTIONS``."""
    if op not in REDUCTIONS:
        raise invalid("op", f"one of {', '.join(REDUCTIONS)}", repr(op))


def check_one_entry_per_rank(tensor: Tensor, size: int) -> None:
    """Refuses a tensor whose leading dimension does not hold one entry for each rank of the group."""
    if tensor.dim() == 0 or tensor.shape[0] != size:
        raise invalid("tensor", f"of shape [{size}, ...], one entry for each rank", tuple(tensor.shape))
