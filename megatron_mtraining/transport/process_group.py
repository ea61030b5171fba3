"""Transport over a torch.distributed process group: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..errors import invalid
from .base import HALF_DTYPES, Pending, Received, check_one_entry_per_rank, check_reduction
from .exposure import exposed

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# Named *_single from torch 2.13 on, where the names of before warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class PostedTransfer:
    """Transfer that torch.distributed works on.

    Holds the sent tensor until ``wait``: from then on the current stream comes after the transfer, so that memory
    which the allocator hands out again on this stream cannot be read or written by it any more.
    """

    transport: ProcessGroupTransport
    operation: str
    works: list[dist.Work]
    sent: Tensor | None
    received: Tensor

    def wait(self) -> Tensor:
        """Return the received tensor. With NCCL only the current stream waits, with gloo the host does."""
        try:
            with exposed(self.received.device):
                for work in self.works:
                    work.wait()
        except RuntimeError as error:
            raise self.transport.with_its_ranks(self.operation, error) from error
        self.works, self.sent = [], None
        return self.received

    def __del__(self) -> None:
        """Retain the memory of a transfer that nobody has waited for, as after an error in between: it continues."""
        if self.works:
            for each in list(_unawaited.values()):
                if all(work.is_completed() for work in each.works):
                    _unawaited.pop(id(each), None)
            unawaited = _Unawaited(self.transport, self.works, self.sent, self.received)
            _unawaited[id(unawaited)] = unawaited


class ProcessGroupTransport:
    """This rank's end of a process group, which may be any subset of the job's ranks in any order.

    Data that is only moved travels as raw bytes, so every dtype does. Gloo sums 16-bit floats as float32.

    Args:
        group: a group that this rank belongs to.

    Raises:
        ValueError: this rank does not belong to ``group``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise invalid("group", "a process group that this rank belongs to", f"{group} on rank {dist.get_rank()}")
        self.size = dist.get_world_size(group)
        self.global_ranks = tuple(dist.get_process_group_ranks(group))
        self._neighbours = self.global_ranks[(self.rank + 1) % self.size], self.global_ranks[self.rank - 1]
        self._backends: dict[str, str] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(f"The process group of ranks {self.global_ranks} must be alive, got a destroyed one.")
        return group

    def check_device(self, device: torch.device) -> None:
        """Refuse memory that the group cannot send from.

        Raises:
            ValueError: the group has no backend for it, or gloo would have to send from a GPU, which it cannot.
        """
        self._backend_for(device)

    def exchange(self, tensor: Tensor) -> PostedTransfer:
        """Post ``tensor`` to rank + 1; one of the same shape and dtype comes from rank - 1, cyclically."""
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        self._backend_for(sent.device)

        def post(group: dist.ProcessGroup) -> list[dist.Work]:
            successor, predecessor = self._neighbours
            send = dist.P2POp(dist.isend, unowned(_bytes(sent)), successor, group)
            receive = dist.P2POp(dist.irecv, unowned(_bytes(received)), predecessor, group)
            # Gloo announces a receive on the connection that carries the data: between two ranks it would queue behind
            # a send posted first, and the two directions would follow each other.
            return dist.batch_isend_irecv([receive, send])

        return self._post("exchange", post, sent, received)

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Compute the ``sum`` or ``max`` of every rank's ``tensor``, in place."""
        check_reduction(op)
        travelling = tensor.contiguous()
        if self._backend_for(tensor.device) == "gloo" and tensor.dtype in HALF_DTYPES:
            travelling = travelling.float()
        self._collect("all_reduce", dist.all_reduce, travelling, op=_REDUCE_OPS[op])
        return tensor if travelling is tensor else tensor.copy_(travelling)

    def assemble(self, tensor: Tensor) -> Tensor:
        """Join parts bit for bit, in place: each element must be all zero bits on every rank but at most one.

        The bits are summed as integers. Where at most one summand is not zero that is exact, NaN payloads and -0 too.
        """
        travelling = _aligned(tensor)
        self._backend_for(tensor.device)
        self._collect("all_reduce", dist.all_reduce, _bits(travelling))
        return tensor if travelling is tensor else tensor.copy_(travelling)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather every rank's ``tensor``: ``[size, *tensor.shape]``."""
        self._backend_for(tensor.device)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._collect("all_gather", _all_gather, _bytes(gathered), _bytes(tensor.contiguous()))
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Exchange ``[size, *shape]``, entry i meant for rank i, for ``[size, *shape]``, entry i come from rank i."""
        check_one_entry_per_rank(tensor, self.size)
        self._backend_for(tensor.device)
        received = tensor.new_empty(tensor.shape)
        sent = tensor.contiguous()
        self._collect("all_to_all", dist.all_to_all_single, _bytes(received), _bytes(sent))
        return received

    def post_all_reduce(self, tensor: Tensor) -> Pending:
        """Post the sum of every rank's ``tensor``, in place. Gloo does it at once."""
        if self._backend_for(tensor.device) == "gloo" or not tensor.is_contiguous():
            return Received(self.all_reduce(tensor))

        def post(group: dist.ProcessGroup) -> list[dist.Work]:
            return [dist.all_reduce(unowned(tensor), group=group, async_op=True)]

        return self._post("all_reduce", post, tensor, tensor)

    def post_all_gather(self, tensor: Tensor) -> Pending:
        """Post ``[size, *tensor.shape]``: every rank's ``tensor``."""
        self._backend_for(tensor.device)
        sent, gathered = tensor.contiguous(), tensor.new_empty((self.size, *tensor.shape))

        def post(group: dist.ProcessGroup) -> list[dist.Work]:
            parts = unowned(_bytes(gathered)), unowned(_bytes(sent))
            return [_all_gather(*parts, group=group, async_op=True)]

        return self._post("all_gather", post, sent, gathered)

    def post_reduce_scatter(self, tensor: Tensor) -> Pending:
        """Post, from ``[size, *shape]`` on every rank, the sum of the entries meant for this one: ``[*shape]``.

        Gloo has no such operation in every supported torch: there the entries are exchanged and summed here, at once.
        """
        check_one_entry_per_rank(tensor, self.size)
        if self._backend_for(tensor.device) == "gloo":
            return Received(self.all_to_all(tensor).sum(0, dtype=tensor.dtype))
        sent, reduced = tensor.contiguous(), tensor.new_empty(tensor.shape[1:])

        def post(group: dist.ProcessGroup) -> list[dist.Work]:
            return [_reduce_scatter(unowned(reduced.view(-1)), unowned(sent.view(-1)), group=group, async_op=True)]

        return self._post("reduce_scatter", post, sent, reduced)

    def _post(
        self,
        operation: str,
        post: Callable[[dist.ProcessGroup], list[dist.Work]],
        sent: Tensor,
        received: Tensor,
    ) -> PostedTransfer:
        """Begin a transfer on the stream of its group, unless its tensors are empty."""
        group = self.group
        try:
            _wait_on_the_host(self)
            works = post(group) if sent.numel() else []
        except RuntimeError as error:
            raise self.with_its_ranks(operation, error) from error
        return PostedTransfer(self, operation, works, sent, received)

    def _collect(self, operation: str, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
        """Run a collective that the stream (with gloo the host) waits for, unless its tensors are empty."""
        if not tensors[0].numel():
            return
        group = self.group
        try:
            _wait_on_the_host(self)
            with exposed(tensors[0].device):
                collective(*tensors, group=group, **options)
        except RuntimeError as error:
            raise self.with_its_ranks(operation, error) from error

    def with_its_ranks(self, operation: str, error: RuntimeError) -> RuntimeError:
        """Add the ranks that took part to what torch.distributed raised: its own words name addresses only."""
        ranks = ", ".join(map(str, self.global_ranks))
        return RuntimeError(
            f"{operation} failed on rank {self.global_ranks[self.rank]} in the group of ranks {ranks}: {error}. "
            f"A rank of the group has probably stopped; its own log has the reason. "
            f"In a ring the first suspect is rank {self.global_ranks[self.rank - 1]}, which sends to this one."
        )

    def _backend_for(self, device: torch.device) -> str:
        """Return the name of the backend that sends from the memory of ``device``; see :meth:`check_device`."""
        kind = device.type
        if kind not in self._backends:
            config = dist.get_backend_config(self.group)
            backend = dict(pair.split(":", 1) for pair in config.split(",")).get(kind)
            if backend is None or (backend == "gloo" and kind != "cpu"):
                raise invalid(
                    "group",
                    f"able to send tensors from {kind} memory",
                    f"a group with backends {config}",
                    "Create it with backend='cpu:gloo,cuda:nccl', or move the tensors.",
                )
            self._backends[kind] = backend
        return self._backends[kind]


class _Unawaited(NamedTuple):
    """Resources of a transfer that nobody will wait for."""

    transport: ProcessGroupTransport
    works: list[dist.Work]
    sent: Tensor | None
    received: Tensor


_unawaited: dict[int, _Unawaited] = {}
"""Transfers that nobody will wait for, by ``id``; dropped once they have ended, when the next one comes.

Another thread, or a collection of garbage, may add one at any moment: entries come and go one by one.
"""


def _wait_on_the_host(transport: ProcessGroupTransport) -> None:
    """End those of gloo, whose group would give what arrives to a later transfer once their memory is gone."""
    for each in list(_unawaited.values()):
        if each.transport is transport and not each.received.is_cuda:
            _unawaited.pop(id(each), None)
            for work in each.works:
                work.wait()


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor's memory as flat bytes, for transfers without arithmetic: every backend sends them."""
    return tensor.view(-1).view(torch.uint8)


def _bits(tensor: Tensor) -> Tensor:
    """View the memory of an :func:`_aligned` tensor as flat integers that every backend sums, by size alone.

    Words where they divide it, which are a quarter as many; a rank with bytes could not sum with one that has words.
    """
    flat = tensor.view(-1)
    return flat.view(torch.uint8 if flat.numel() * flat.element_size() % 4 else torch.int32)


def _aligned(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a contiguous copy where words cannot be a view of it."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.element_size() % 4 else tensor


def unowned(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that torch's allocator does not own, so that record_stream passes it by.

    torch.distributed calls ``record_stream`` on what its sends and receives are given. Memory freed after that is only
    handed out again when NCCL's stream has done all that it was given until then: the further the host runs ahead, the
    more ring steps' worth of it piles up. A transfer that is waited for before its tensors are freed needs none.
    """
    return from_dlpack(to_dlpack(tensor))


def gather_numbers(numbers: Sequence[float]) -> Tensor:
    """Gather ``numbers`` of every rank of the job in one collective: float64 ``[ranks, len(numbers)]`` on the host."""
    row = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return row[None]
    on_host = "cpu:" in dist.get_backend_config(dist.group.WORLD)
    world = ProcessGroupTransport(dist.group.WORLD)
    return world.all_gather(row if on_host else row.cuda()).cpu()
