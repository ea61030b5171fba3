"""The interface that selection and ring attention talk to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


class Pending(Protocol):
    """A transfer that was posted and may still be under way."""

    def wait(self) -> tuple[Tensor, ...]:
        """The received tensors, safe to read on the current stream. Never blocks the host on a CUDA stream."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's end of one group. Every rank of the group makes the same calls in the same order.

    Inputs are left unchanged unless a method says otherwise, and stay readable by the transfer until it has ended.
    """

    rank: int
    """This rank's number inside the group."""

    size: int
    """Ranks in the group."""

    global_ranks: tuple[int, ...]
    """The group's members as the whole job numbers them, for error messages."""

    def exchange(self, tensors: Sequence[Tensor]) -> Pending:
        """Posts ``tensors`` to rank + 1 and receives as many of the same shapes and dtypes from rank - 1, cyclically."""
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
