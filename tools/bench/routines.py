"""Selection and packing: the steps before attention, each with its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_mtraining import select
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.backends.protocol import AttentionBackend
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.types import VerticalSlashIndex

from .baselines.ours import kernels_unavailable
from .check import Standard
from .indices import IndexShape
from .problem import Inputs, Problem


@dataclass(frozen=True, kw_only=True)
class Routine:
    """One implementation of a step before attention."""

    name: str
    operation: str
    """Name of the step: ``selection`` or ``packing``."""

    run: Callable[[], tuple[Tensor, ...]]
    check: Callable[[], None]
    """Callable that raises AssertionError unless the result is right."""


def selection_routines(problem: Problem, standard: Standard, config: MTrainingConfig) -> list[Routine]:
    """Return the package's selection by its kernels, where they can run, and in torch.

    On the smaller problem each must choose what is chosen there in float64.
    """
    choices = {"torch": replace(config, backend="reference")}
    if kernels_unavailable(problem, "sm80") is None:
        choices = {"mtraining-kernel": config, **choices}
    return [_selection_routine(problem, standard, name, choice) for name, choice in choices.items()]


def _selection_routine(problem: Problem, standard: Standard, name: str, config: MTrainingConfig) -> Routine:
    inputs, small = standard.inputs, standard.small

    def run() -> tuple[Tensor, ...]:
        return select(inputs.query, inputs.key, config, softmax_scale=problem.softmax_scale).tensors

    def check() -> None:
        given = standard.small_inputs
        chosen = select(given.query, given.key, config, softmax_scale=small.softmax_scale)
        wide = (given.query.double(), given.key.double())
        exact = select(*wide, config, softmax_scale=small.softmax_scale)
        for field, ours, expected in zip(_LISTS, chosen.tensors, exact.tensors, strict=True):
            differing = int((ours != expected).sum())
            assert not differing, f"index.{field} has {differing} entries other than the selection in float64."

    return Routine(name=name, operation="selection", run=run, check=check)


def packing_routines(problem: Problem, standard: Standard) -> list[Routine]:
    """Return packing of the vertical rows: by the kernel where it can run, and plain in torch; both copy exact bits."""
    inputs, index = standard.inputs, standard.index
    geometry = BlockGeometry.whole(seq_len=problem.seq_len, block_size=index.block_size)
    packers: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"torch": ReferenceBackend().pack}
    if kernels_unavailable(problem, "sm80") is None:
        packers = {"mtraining-kernel": _kernels().pack, **packers}

    def routine(name: str, pack: Callable[..., tuple[Tensor, Tensor]]) -> Routine:
        def run() -> tuple[Tensor, ...]:
            return pack(inputs.key, inputs.value, index, geometry)

        return Routine(name=name, operation="packing", run=run, check=lambda: _check_packed(run(), inputs, index))

    return [routine(name, pack) for name, pack in packers.items()]


def selection_config(shape: IndexShape, **changes: object) -> MTrainingConfig:
    """Return the configuration of the selection that is measured; every document is estimated.

    Args:
        shape: of the lists; a budget by cost decides their lengths itself.
        changes: further fields of the configuration.
    """
    if changes.get("budget") == "cost":
        return MTrainingConfig(dense_below=0, **changes)
    return replace(
        MTrainingConfig.algorithm_1(num_probe_windows=8),
        sink_tokens=shape.sinks,
        local_blocks=shape.local,
        max_vertical=shape.verticals - shape.sinks,
        max_slash=shape.distances - shape.local,
        dense_below=0,
        **changes,
    )


_LISTS = ("vertical", "num_vertical", "slash", "num_slash")
"""Names of ``VerticalSlashIndex.tensors``."""


def _kernels() -> AttentionBackend:
    from megatron_mtraining.backends.cuda import cuda_backend

    return cuda_backend()


def _check_packed(packed: tuple[Tensor, ...], inputs: Inputs, index: VerticalSlashIndex) -> None:
    lists_per_head = index.num_lists // inputs.key.shape[2]
    for name, rows, source in (("key", packed[0], inputs.key), ("value", packed[1], inputs.value)):
        for row in range(index.rows):
            for number in range(index.num_lists):
                count = int(index.num_vertical[row, number])
                expected = source[row, index.vertical[row, number, :count].long(), number // lists_per_head]
                right = torch.equal(rows[row, number, :count], expected) and not rows[row, number, count:].any()
                assert right, f"packed {name} of list {number} must be the rows that its verticals name, got others."
