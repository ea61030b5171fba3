"""Simulator of a job: every rank is a thread of this process, so that tests run multi-rank code on one machine.

Ranks talk over queues, without sockets, by the same protocol as process groups do.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import as_integer, invalid
from ..transport import RingGroups, inner_and_outer_ranks
from ..transport.base import HALF_DTYPES, PostsAtOnce, Received, check_one_entry_per_rank, check_reduction

_REPORT_S = 5.0
"""Seconds that ranks have after the deadline to report what they waited for."""


class RankSimulator:
    """Runner of one function on every rank of a simulated job.

    Autograd runs the backward of CPU tensors in the thread that calls it, so autograd functions that communicate work
    as they do in processes of their own.

    Args:
        world_size: number of ranks, each of which is a thread.
        timeout: seconds within which a run must end; ranks that still wait for another one then raise.
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout = timeout

    def run(self, function: Callable[[ThreadTransport], Any]) -> list[Any]:
        """Call ``function(group)`` on every rank and return what the ranks returned, in rank order.

        Raises:
            BaseException: the first error of any rank, with a note that names it. Ranks that only waited for a rank
                which had failed are passed over.
            TimeoutError: a rank has not ended in time; the others' threads are daemons and do not keep the process.
        """
        hub = ThreadHub(self.world_size, timeout=self.timeout)
        results: list[Any] = [None] * self.world_size
        errors: list[tuple[int, BaseException]] = []

        def body(rank: int) -> None:
            try:
                results[rank] = function(hub.world(rank))
                hub.stop(rank, "has returned")
            except BaseException as error:
                errors.append((rank, error))
                hub.stop(rank, f"stopped with {type(error).__name__}: {error}")

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        _run_with_one_torch_thread_each(threads, deadline=time.monotonic() + self.timeout + _REPORT_S)
        _raise_first(errors)
        running = [thread.name for thread in threads if thread.is_alive()]
        if running:
            raise TimeoutError(f"{', '.join(running)} did not end within {self.timeout:g} s.")
        return results


def _run_with_one_torch_thread_each(threads: list[threading.Thread], *, deadline: float) -> None:
    """Start and join ``threads``; many ranks share few cores, where torch's own threads would only queue up."""
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        torch.set_num_threads(num_torch_threads)


def _raise_first(errors: list[tuple[int, BaseException]]) -> None:
    own = [entry for entry in errors if not isinstance(entry[1], PeerStoppedError)]
    for rank, error in own or errors:
        error.add_note(f"raised on rank {rank}")
        raise error


class PeerStoppedError(RuntimeError):
    """Error of a rank that waits for another one that has returned or failed; the message names both."""


class _Message(NamedTuple):
    """Message from one rank to another."""

    operation: str
    tensor: Tensor
    """A copy that nobody writes to: several ranks may read it."""


@dataclass(frozen=True, slots=True)
class _Stopped:
    """Last entry that a rank leaves for every other one."""

    reason: str


class ThreadHub:
    """Shared state of the ranks of one simulated job: a queue for each ordered pair of ranks in each group.

    Args:
        world_size: number of ranks.
        timeout: seconds from now at which a rank that still waits for another raises.
    """

    def __init__(self, world_size: int, *, timeout: float) -> None:
        self.world_size = as_integer("world_size", world_size, least=1)
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._lock = threading.Lock()
        self._edges: dict[tuple[Any, int, int], queue.SimpleQueue] = {}
        self._stopped: dict[int, _Stopped] = {}

    def world(self, rank: int) -> ThreadTransport:
        """Return the group of all ranks, as ``rank`` sees it."""
        return ThreadTransport(self, ("world",), tuple(range(self.world_size)), rank)

    def edge(self, channel: Any, source: int, destination: int) -> queue.SimpleQueue:
        """Return the queue of ``channel`` from one rank to another."""
        key = (channel, source, destination)
        with self._lock:
            if key not in self._edges:
                self._edges[key] = queue.SimpleQueue()
                if source in self._stopped:
                    self._edges[key].put(self._stopped[source])
            return self._edges[key]

    def seconds_left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def stop(self, rank: int, reason: str) -> None:
        """Tell every rank that waits for ``rank``, now or later, that nothing more will come from it."""
        with self._lock:
            self._stopped[rank] = _Stopped(reason)
            for (_, source, _), waiting in self._edges.items():
                if source == rank:
                    waiting.put(self._stopped[rank])


class ThreadTransport(PostsAtOnce):
    """End of a group that one simulated rank holds. Whatever is received is a copy, as after a real transfer."""

    def __init__(self, hub: ThreadHub, channel: tuple[Any, ...], global_ranks: tuple[int, ...], rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = len(global_ranks)
        self.global_ranks = global_ranks
        self._channel = channel
        self._num_splits = 0
        self._num_posted = 0
        self._num_taken = 0
        self._arrived: dict[int, Tensor] = {}

    def split(self, partition: Sequence[Sequence[int]]) -> ThreadTransport:
        """Return the part of this group that this rank falls into.

        Args:
            partition: lists of this group's ranks, the same on every rank; one of them holds this rank.
        """
        self._num_splits += 1
        for part in partition:
            if self.rank in part:
                members = tuple(self.global_ranks[rank] for rank in part)
                channel = (*self._channel, self._num_splits, members)
                return ThreadTransport(self.hub, channel, members, list(part).index(self.rank))
        raise invalid("partition", f"lists of ranks that hold rank {self.rank}", partition)

    def ring_groups(self, inner_size: int) -> RingGroups:
        """Return inner and outer groups over this group's ranks, for keys and for gradients."""
        inner, outer = inner_and_outer_ranks(range(self.size), inner_size=inner_size)
        return RingGroups(
            cp=self,
            inner=self.split(inner),
            outer=self.split(outer),
            inner_gradient=self.split(inner),
            outer_gradient=self.split(outer),
        )

    def exchange(self, tensor: Tensor) -> PostedToThread:
        """Post ``tensor`` to rank + 1; one of the same shape and dtype comes from rank - 1, cyclically."""
        self._send("exchange", (self.rank + 1) % self.size, _copy(tensor))
        self._num_posted += 1
        return PostedToThread(self, self._num_posted, _signature(tensor))

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Compute the ``sum`` or ``max`` of every rank's ``tensor``, in place, in rank order: alike on every rank."""
        check_reduction(op)
        parts = self._share("all_reduce", tensor)
        return tensor.copy_(_sum(parts) if op == "sum" else functools.reduce(torch.maximum, parts))

    def assemble(self, tensor: Tensor) -> Tensor:
        """Join parts bit for bit, in place: each element must be all zero bits on every rank but at most one."""
        bits = _sum([part.view(-1).view(torch.uint8) for part in self._share("assemble", tensor)])
        return tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather every rank's ``tensor``: ``[size, *tensor.shape]``."""
        return torch.stack(self._share("all_gather", tensor))

    def post_reduce_scatter(self, tensor: Tensor) -> Received:
        """Return, from ``[size, *shape]`` on every rank, the sum of the entries meant for this one: ``[*shape]``."""
        return Received(_sum(self.all_to_all(tensor)).to(tensor.dtype))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Exchange ``[size, *shape]``, entry i meant for rank i, for ``[size, *shape]``, entry i come from rank i."""
        check_one_entry_per_rank(tensor, self.size)
        for peer in range(self.size):
            self._send("all_to_all", peer, _copy(tensor[peer]))
        return torch.stack([self._take("all_to_all", peer, _signature(tensor[0])) for peer in range(self.size)])

    def take_exchanged(self, ticket: int, expected: str) -> Tensor:
        """Return what the ``ticket``-th exchange of this rank received; exchanges may be waited for in any order."""
        while ticket not in self._arrived:
            self._num_taken += 1
            self._arrived[self._num_taken] = self._take("exchange", (self.rank - 1) % self.size, None)
        tensor = self._arrived.pop(ticket)
        self._check("exchange", (self.rank - 1) % self.size, tensor, expected)
        return tensor

    def _share(self, operation: str, tensor: Tensor) -> list[Tensor]:
        """Return every rank's ``tensor``, in rank order, for reading only."""
        copy = _copy(tensor)
        for peer in range(self.size):
            self._send(operation, peer, copy)
        return [self._take(operation, peer, _signature(tensor)) for peer in range(self.size)]

    def _edge(self, operation: str, source: int, destination: int) -> queue.SimpleQueue:
        """Return the queue from one rank to another. An exchange has its own: a collective may run before its wait."""
        channel = (*self._channel, operation == "exchange")
        return self.hub.edge(channel, self.global_ranks[source], self.global_ranks[destination])

    def _send(self, operation: str, peer: int, tensor: Tensor) -> None:
        self._edge(operation, self.rank, peer).put(_Message(operation, tensor))

    def _take(self, operation: str, peer: int, expected: str | None) -> Tensor:
        waiting = f"rank {self.global_ranks[self.rank]} waits in {operation} for rank {self.global_ranks[peer]}"
        source = self._edge(operation, peer, self.rank)
        try:
            message = source.get(timeout=self.hub.seconds_left())
        except queue.Empty:
            raise TimeoutError(f"{waiting}, which has sent nothing {self.hub.timeout:g} s after the start.") from None
        if isinstance(message, _Stopped):
            source.put(message)
            raise PeerStoppedError(f"{waiting}, which {message.reason}.")
        if message.operation != operation:
            raise RuntimeError(f"{waiting}, which called {message.operation} instead.")
        if expected is not None:
            self._check(operation, peer, message.tensor, expected)
        return message.tensor

    def _check(self, operation: str, peer: int, tensor: Tensor, expected: str) -> None:
        """Refuse a tensor of another shape: a real transfer of it would hang or write past its buffer."""
        sent = _signature(tensor)
        if sent != expected:
            raise RuntimeError(
                f"rank {self.global_ranks[self.rank]} expects {expected} in {operation} from rank "
                f"{self.global_ranks[peer]}, which sent {sent}."
            )


class PostedToThread(NamedTuple):
    """Exchange whose tensor was sent and whose arrival lies in a queue."""

    transport: ThreadTransport
    ticket: int
    expected: str

    def wait(self) -> Tensor:
        """Return the received tensor."""
        return self.transport.take_exchanged(self.ticket, self.expected)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum in rank order; 16-bit floats are summed as float32."""
    total = parts[0].float() if parts[0].dtype in HALF_DTYPES else parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _signature(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
