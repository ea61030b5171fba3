"""Detection of ranks that were called with different plans, before their transfers would wait forever.

``select`` and ``sparse_attention`` begin with the same collective, a row of one width for each rank, so that ranks
that called different functions take part in it too. The entries of an index are compared by a digest, which is made
without a copy of the index.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RankMismatchError
from ..tensors import cached_tensors, to_device
from ..types import VerticalSlashIndex
from .base import Transport

PLAN_FIELDS = (
    "operation",
    "query.shape",
    "key.shape",
    "query.dtype",
    "layout",
    "softmax_scale",
    "config",
    "requires_grad",
    "schedule",
    "inner group size",
    "backend",
    "index widths",
    "cu_seqlens",
    "num_valid",
)
"""Fields that must be the same on every rank and are known to the host, in the order of the digest."""

_COLUMNS = ("raised", *PLAN_FIELDS, "index entries")
_DOCUMENT_FIELDS = ("index widths", "cu_seqlens", "num_valid")
"""Fields that packed documents and padding change from step to step; the others make up the kind of a call."""


def agree_on_plan(
    plan: Mapping[str, object], group: Transport, *, device: torch.device, index: VerticalSlashIndex | None = None
) -> None:
    """Gather a digest of every rank's plan, the first collective of every call, and compare them.

    On the CPU the host compares at once. On a GPU it waits only for the first call of each kind, the plan without what
    changes with the documents; the tables of later calls are copied in the background and compared by a following call.

    Args:
        plan: the values of those of ``PLAN_FIELDS`` that the operation has, always ``operation``: its public name.
        group: of all ranks that must agree.
        device: which the operation's tensors are on.
        index: on ``device``, of an operation that takes one; its entries must be the same everywhere too.

    Raises:
        RankMismatchError: plans differ, or a rank raised for its arguments; the message names ranks and fields.
    """
    if group.size == 1:
        return
    _compare_arrived()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # need not be of the current device
    row = _row(tuple(map(plan.get, PLAN_FIELDS)), device)
    if index is not None:
        row = torch.cat((row[:-1], index_digest(index)))
    call = _GatheredCall(group.all_gather(row), plan, group.rank, group.global_ranks)
    if stream is None:
        call.compare()
    else:
        _compare_without_waiting(call, stream)


@contextmanager
def announced_errors(group: Transport, *given: object) -> Iterator[None]:
    """Wrap the checks before :func:`agree_on_plan`: a rank that raises there takes part in the collective first.

    What was ``given`` as the call's tensors may be None. The first must be on a device from which the group can send.

    The other ranks raise as after any other disagreement: before they continue, on the CPU and in the first call of
    its kind on a GPU. In later calls on a GPU they have posted transfers by then that this rank does not take part in;
    they raise in a following call, or when the group's timeout ends the wait.
    """
    try:
        yield
        group.check_device(given[0].device)
    except Exception:
        if group.size > 1:
            row = torch.tensor([1] + [0] * (len(_COLUMNS) - 1), device="cpu")
            group.all_gather(to_device(row, _likely_device(group, given)))
        raise


def _likely_device(group: Transport, given: Sequence[object]) -> torch.device:
    """Return the likely device of other ranks' rows: that of a tensor of this call, else the GPU if there is one."""
    devices = [tensor.device for tensor in given if isinstance(tensor, Tensor)]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    for device in devices:
        with suppress(ValueError):
            group.check_device(device)
            return device
    return torch.device("cpu")


@dataclass(slots=True)
class _GatheredCall:
    """Digests of one call by every rank, and the arguments that this rank called with."""

    table: Tensor  # int64 [group size, len(_COLUMNS)]
    plan: Mapping[str, object]
    rank: int
    global_ranks: tuple[int, ...]
    arrived: torch.cuda.Event | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Kind of the call, which calls of a training run share: as many kinds as lengths and modes, no more."""
        return (self.global_ranks, *(value for name, value in self.plan.items() if name not in _DOCUMENT_FIELDS))

    def compare(self) -> None:
        """Raise RankMismatchError unless all rows are equal to this rank's, which has not raised."""
        if torch.equal(self.table, self.table[:1].expand_as(self.table)):
            return
        columns = dict(zip(_COLUMNS, self.table.T.tolist(), strict=True))
        raising = [rank for rank, raised in zip(self.global_ranks, columns["raised"], strict=True) if raised]
        if raising:
            raise RankMismatchError(
                f"{_name(raising)} raised an error for the arguments of a call, so {self.plan['operation']} cannot "
                f"continue here. See the error of that rank."
            )
        differing = [name for name, digests in columns.items() if len(set(digests)) > 1]
        if "operation" in differing:
            differing = ["operation"]  # whose fields are not the same ones
        if differing:
            raise RankMismatchError(" ".join(self._sentence(name, columns[name]) for name in differing))

    def _sentence(self, field: str, digests: Sequence[int]) -> str:
        usual = max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))
        others = [rank for rank, digest in zip(self.global_ranks, digests, strict=True) if digest != usual]
        agreeing = [rank for rank in self.global_ranks if rank not in others]
        own = f", here on rank {self.global_ranks[self.rank]} {self.plan.get(field)}" if field in PLAN_FIELDS else ""
        return (
            f"{field} must be the same on every rank of the group, got another value on {_name(others)} than on "
            f"{_name(agreeing)}{own}."
        )


_seen: dict[tuple[object, ...], None] = {}
"""Kinds of calls that were compared at once, the oldest first."""

_MOST_SEEN = 1024
"""Kinds that are remembered where lengths never repeat; the next call of one that is not waits as its first did."""

_unread: deque[_GatheredCall] = deque()


def _compare_without_waiting(call: _GatheredCall, stream: torch.cuda.Stream) -> None:
    """Copy the table to the host behind the current stream; wait for it only when a call of this kind is new."""
    call.table = call.table.to("cpu", non_blocking=True)  # which torch puts into pinned memory then
    call.arrived = stream.record_event()
    if call.kind in _seen:
        _unread.append(call)
        return
    call.arrived.synchronize()
    call.compare()
    _seen[call.kind] = None
    if len(_seen) > _MOST_SEEN:
        del _seen[next(iter(_seen))]


def _compare_arrived() -> None:
    """Compare the tables of earlier calls that have reached the host by now."""
    while _unread and _unread[0].arrived.query():
        _unread.popleft().compare()


@cached_tensors(maxsize=64)
def _row(values: tuple[object, ...], device: torch.device) -> Tensor:
    """int64 ``[len(_COLUMNS)]``: no error, the digests of ``PLAN_FIELDS``, and 0 for that of an index.

    Cached for the next layers, which have the same plan; nobody writes to it.
    """
    return to_device(torch.tensor([0, *map(_digest, values), 0], device="cpu"), device)


def _digest(value: object) -> int:
    """Return a number of 56 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=7).digest())


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


_CHUNK_ELEMENTS = 2**22
"""Most entries that are widened to 8 bytes at a time."""

_CACHED_ELEMENTS = 2**18
"""Most entries whose weights, 2 MiB of them, are cached for the next layers: then three launches make a digest."""


def index_digest(index: VerticalSlashIndex) -> Tensor:
    """int64 ``[1]`` on the index's device: a weighted sum, modulo 2**64, of all that the index holds.

    The weight of an entry is that of its column times that of its list. So columns are summed first, once for the lists
    that an expanded table repeats, and equal entries give equal digests whatever the strides. Weights are odd: a change
    of any one entry changes the sum.
    """
    rows, num_lists = index.num_vertical.shape
    widths = (index.vertical.shape[2], index.slash.shape[2], 1, 1)
    if rows * num_lists * sum(widths) <= _CACHED_ELEMENTS:
        tables = (index.vertical, index.slash, index.num_vertical.unsqueeze(2), index.num_slash.unsqueeze(2))
        weights = _entry_weights(rows, num_lists, sum(widths), index.vertical.device)
        return (torch.cat(tables, 2) * weights).sum().view(1)
    *columns, lists = _weights(sum(widths) + rows * num_lists, index.vertical.device).split([*widths, rows * num_lists])
    sums = (
        _sum_columns(index.vertical, columns[0])
        + _sum_columns(index.slash, columns[1])
        + index.num_vertical * columns[2]
        + index.num_slash * columns[3]
    )
    return (sums * lists.view(rows, num_lists)).sum().view(1)


@cached_tensors(maxsize=8)
def _entry_weights(rows: int, num_lists: int, width: int, device: torch.device) -> Tensor:
    """int64 ``[rows, num_lists, width]``: the weight of each entry of all tables side by side."""
    columns, lists = _weights(width + rows * num_lists, device).split([width, rows * num_lists])
    return lists.view(rows, num_lists, 1) * columns


def _weights(count: int, device: torch.device) -> Tensor:
    """int64 ``[count]``, odd, and mixed so that products of two of them do not repeat."""
    multiples = torch.arange(1, 2 * count, 2, device=device) * -0x61C8864680B583EB
    return multiples ^ (multiples >> 31 << 1)


def _sum_columns(table: Tensor, weights: Tensor) -> Tensor:
    """int64 ``[rows or 1, num_lists or 1]``: the weighted sum of each list that ``table`` has in memory."""
    for dim in (0, 1):
        if table.stride(dim) == 0:
            table = table.narrow(dim, 0, 1)
    rows_at_once = max(1, _CHUNK_ELEMENTS // max(1, table[0].numel()))
    return torch.cat([(part * weights).sum(2) for part in table.split(rows_at_once)])
