"""Rehearsal of a ring's call without the ring: as many steps, all of them on a rank's own keys.

The operations, their order, their tensors and how long they follow each other are a ring's, so a GPU at its power limit
has the clocks that it has there. What a ring adds is other ranks' keys, and the transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.commands.stopwatch import Stopwatch
from megatron_mtraining.types import AttentionOutput, VerticalSlashIndex

from .layer import ParallelState, RingLayer
from .step_clock import CallTimes, StepClock, time_call


class DryRun:
    """Calls on one rank. All ranks run at once.

    Args:
        layer: whose queries and keys; of an even layout, so that all ranks have the same to do.
        index: of the call.
        place: of the rank, of several.
        stopwatch: what times it.
    """

    def __init__(
        self, layer: RingLayer, index: VerticalSlashIndex, parallel: ParallelState, stopwatch: Stopwatch
    ) -> None:
        self._backend, self._stopwatch, self._parallel, self._index = layer.backend(), stopwatch, parallel, index
        query, key, value = self._given = tuple(leaf.detach() for leaf in layer.leaves)
        self._grad_out, self._scale = layer.grad_out, query.shape[3] ** -0.5
        own = layer.layout.blocks(parallel.rank)
        sizes = {"seq_len": layer.layout.seq_len, "block_size": layer.layout.block_size}
        self.geometry = BlockGeometry(**sizes, query_blocks=own, key_blocks=own)
        pack = self._backend.pack(key, value, index, self.geometry)
        self._packed = parallel.transports("flat").cp.assemble(pack)
        self._keys = torch.stack((key, value))

    @property
    def key_bytes(self) -> int:
        """Bytes of a rank's keys and values."""
        return self._keys.numel() * self._keys.element_size()

    def call(self, *, beside: bool) -> CallTimes:
        """Run a forward and a backward. With ``beside``, a transfer of the keys lies beside every step but the last."""
        return time_call(
            self._stopwatch,
            self._backend,
            lambda clock: self._forward(clock, beside),
            lambda clock, result: self._backward(clock, result, beside),
        )

    def empty_step(self, direction: str) -> Callable[[], object]:
        """Run a later step on keys that lie behind all queries: no pair is computed."""
        backend, given, index = self._backend, self._given, self._index
        num_blocks = -(-self.geometry.seq_len // self.geometry.block_size)
        far = {"seq_len": 2 * self.geometry.seq_len, "key_blocks": self.geometry.key_blocks + num_blocks}
        geometry, options = replace(self.geometry, **far), {"softmax_scale": self._scale, "is_last": False}
        result = backend.forward(*given, index, self.geometry, packed=self._packed, **options)
        if direction == "forward":
            return lambda: backend.forward(*given, index, geometry, previous=result, **options)
        delta, grad_query = torch.zeros_like(result.lse), torch.zeros_like(result.out)
        given = (self._grad_out, *given, result.lse, delta, index, geometry)
        return lambda: backend.backward(*given, previous=grad_query, **options)

    def _forward(self, clock: StepClock, beside: bool) -> AttentionOutput:
        result, transfer = None, None
        for is_last in self._steps():
            transfer = self._transfer(beside and not is_last)
            options = {"softmax_scale": self._scale, "is_last": is_last}
            options |= {"packed": self._packed if result is None else None, "previous": result}
            result = clock.forward(*self._given, self._index, self.geometry, **options)
            self._arrive(transfer)
        return result

    def _backward(self, clock: StepClock, result: AttentionOutput, beside: bool) -> None:
        delta = clock.softmax_delta(self._grad_out, result.out, None)
        given, tables = (self._grad_out, *self._given), (result.lse, delta, self._index, self.geometry)
        grad_query = None
        for is_last in self._steps():
            transfer = self._transfer(beside and not is_last)
            options = {"softmax_scale": self._scale, "is_last": is_last}
            options |= {"packed": self._packed if grad_query is None else None, "previous": grad_query}
            grad_query, *_ = clock.backward(*given, *tables, **options)
            self._arrive(transfer)

    def _steps(self) -> list[bool]:
        """Return, for each step, whether it is the last."""
        return [step + 1 == self._parallel.world_size for step in range(self._parallel.world_size)]

    def _transfer(self, is_wanted: bool) -> Any:
        return self._parallel.transports("flat").inner.exchange(self._keys) if is_wanted else None

    def _arrive(self, transfer: Any) -> Tensor | None:
        return None if transfer is None else transfer.wait()
