"""Padding of each micro batch, from the pipeline stage that reads tokens to all others.

A collective would block the schedule: a stage takes part only once the activations have reached it. So the first stage
sends a few integers from host to host, and goes on; the others take them when their turn comes. Every stage runs its
micro batches in the same order, which is all that sender and receivers have in common.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron.core import parallel_state

from ..transport.host_messages import HostMessages
from .padding import Padding


class StagePadding:
    """One rank's end: of the ranks that compute one part of the batch, over all pipeline stages and tensor ranks."""

    def __init__(self, messages: HostMessages, num_parts: int) -> None:
        self._messages, self._num_parts = messages, num_parts
        self._known: dict[int, Padding | None] = {}
        self._received = 0
        self._taken: Counter[int | None] = Counter()

    @classmethod
    def create(cls) -> StagePadding | None:
        """Create the group; None where there is one pipeline stage. A collective over all ranks of the job."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return None
        num_parts = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        return cls(HostMessages.among(parallel_state.get_model_parallel_group()), num_parts)

    def destroy(self) -> None:
        """End the group, when nothing is under way in it."""
        self._messages.destroy()

    def is_source(self, model: Any) -> bool:
        """Return whether ``model`` is the part that reads tokens, on the rank that tells the others."""
        return model.pre_process and self._messages.is_source

    def send(self, model: Any, padding: Padding | None) -> Padding | None:
        """Tell all other ranks, and this one's other parts of the model, the next micro batch's padding."""
        self._store(padding)
        self._messages.send([] if padding is None else [padding.rows, padding.seq_len, *sum(padding.runs, ())])
        return self.receive(model)

    def receive(self, model: Any) -> Padding | None:
        """Return the padding of the micro batch that ``model``'s turn is at; wait for the first stage to know."""
        part = getattr(model, "vp_stage", None)
        number = self._taken[part]
        self._taken[part] += 1
        while self._received <= number:
            self._store(_padding(self._messages.receive()))
        padding = self._known[number]
        if len(self._taken) == self._num_parts:
            for old in [each for each in self._known if each < min(self._taken.values())]:
                del self._known[old]
        return padding

    def _store(self, padding: Padding | None) -> None:
        self._known[self._received] = padding
        self._received += 1


def _padding(numbers: list[int]) -> Padding | None:
    if not numbers:
        return None
    rows, seq_len, *runs = numbers
    return Padding(tuple(zip(runs[::3], runs[1::3], runs[2::3], strict=True)), rows, seq_len)
