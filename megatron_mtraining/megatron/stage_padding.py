"""The padding of each micro batch, from the pipeline stage that reads tokens to all others.

A collective would block the schedule: a stage takes part only once the activations have reached it. So the first stage
sends a few integers from host to host, and goes on; the others take them when their turn comes. Every stage runs its
micro batches in the same order, which is all that sender and receivers have in common.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from .padding import Padding

_MOST_UNDER_WAY = 1024
"""Messages that may wait for their receivers: more than micro batches of a few steps."""


class StagePadding:
    """One rank's end: of the ranks that compute one part of the batch, over all pipeline stages and tensor ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._known: dict[int, Padding | None] = {}
        self._received = 0
        self._taken: Counter[int | None] = Counter()

    @classmethod
    def create(cls) -> StagePadding | None:
        """None where there is one pipeline stage. A collective over all ranks of the job."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return None
        own = tuple(dist.get_process_group_ranks(parallel_state.get_model_parallel_group()))
        lists: list[tuple[int, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(lists, own)
        groups = {ranks: dist.new_group(ranks, backend="gloo") for ranks in sorted(set(lists))}
        return cls(groups[own])

    def destroy(self) -> None:
        """Ends the group, when nothing is under way in it."""
        with contextlib.suppress(ValueError):  # torch forgets every group with the job's own
            dist.destroy_process_group(self._group)

    def is_source(self, model: Any) -> bool:
        """Whether ``model`` is the part that reads tokens, on the rank that tells the others."""
        return model.pre_process and dist.get_rank() == self._ranks[0]

    def send(self, model: Any, padding: Padding | None) -> Padding | None:
        """Tells all other ranks, and this one's other parts of the model, the next micro batch's padding."""
        self._store(padding)
        message = _message(padding)
        header = torch.tensor([message.numel()], device="cpu")
        for rank in self._ranks[1:]:
            for part in (header, message):
                if part.numel():
                    self._sent.append((dist.isend(part, rank, group=self._group), part))
        while len(self._sent) > _MOST_UNDER_WAY * len(self._ranks):
            self._sent.popleft()[0].wait()
        return self.receive(model)

    def receive(self, model: Any) -> Padding | None:
        """The padding of the micro batch that ``model``'s turn is at; waits for the first stage to know."""
        part = getattr(model, "vp_stage", None)
        number = self._taken[part]
        self._taken[part] += 1
        while self._received <= number:
            self._store(self._next())
        padding = self._known[number]
        if len(self._taken) == (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1):
            for old in [each for each in self._known if each < min(self._taken.values())]:
                del self._known[old]
        return padding

    def _store(self, padding: Padding | None) -> None:
        self._known[self._received] = padding
        self._received += 1

    def _next(self) -> Padding | None:
        header = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.recv(header, self._ranks[0], group=self._group)
        message = torch.zeros(int(header), dtype=torch.int64, device="cpu")
        if message.numel():
            dist.recv(message, self._ranks[0], group=self._group)
        return _padding(message)


def _message(padding: Padding | None) -> Tensor:
    if padding is None:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.tensor([padding.rows, padding.seq_len, *sum(padding.runs, ())], device="cpu")


def _padding(message: Tensor) -> Padding | None:
    if not message.numel():
        return None
    rows, seq_len, *runs = message.tolist()
    return Padding(tuple(zip(runs[::3], runs[1::3], runs[2::3], strict=True)), rows, seq_len)
