"""The selection on CUDA kernels: a dozen launches for all heads and documents, and nothing as large as the scores.

It chooses what ``reference`` chooses, up to how float32 rounds the mass. What it chooses does not depend on how keys
are spread over ranks, nor on the run: see docs/decisions/0009.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..backends import cuda
from .estimators import choose_by_budget, get_estimator
from .probe_tables import TILE_ROWS, ProbeTables, most_row_tiles, probe_tables
from .task import SelectionTask

MOST_ROW_TILES = 40
"""Tiles of up to 8 probe rows whose scores with one head's keys a CTA can hold the operands of, on every GPU."""


def why_not(task: SelectionTask) -> str | None:
    """Why the reference takes this task and what would change that, in words; None where the kernels take it."""
    config, query = task.config, task.query
    if config.backend == "reference":
        return "The backend is reference. Set another in MTrainingConfig."
    if get_estimator(config.estimator).choose is not choose_by_budget:
        return f"The CUDA kernels choose by budget, the estimator {config.estimator} does not. Take a shipped one."
    tiles = most_row_tiles(task)
    if tiles > MOST_ROW_TILES:
        return (
            f"The CUDA kernels know up to {MOST_ROW_TILES} tiles of {TILE_ROWS} probe rows of one block, got {tiles}. "
            "Lower window or num_probe_windows in MTrainingConfig."
        )
    return cuda.why_unavailable(
        device=query.device, dtype=query.dtype, head_dim=query.shape[3], block_size=config.block_size
    )


def score(task: SelectionTask) -> Callable[[], Tensor]:
    """See :func:`megatron_mtraining.selection.reference.score`."""
    passes, transport, tables = cuda.selection_passes(), task.shards.transport, probe_tables(task)
    scored = _scored(task, tables)
    shape = (task.num_lanes, tables.num_probe_rows)
    maximum = torch.full(shape, float("-inf"), device=task.key.device)
    passes.probe_maximum(*scored, maximum)
    maximum = transport.all_reduce(maximum, op="max")
    total = torch.zeros(shape, dtype=torch.int64, device=task.key.device)
    passes.probe_total(*scored, maximum, total)
    total = transport.all_reduce(total)

    heads, of_list = task.heads_per_list, tables.mass_blocks * task.config.block_size
    waves, per_rank = task.waves(heads * transport.size * of_list)
    entries = sum(task.widths) + 2
    ranked = maximum.new_empty((len(task.planned), len(waves), per_rank, entries), dtype=torch.int32)
    for place, lists in enumerate(waves):
        parts = maximum.new_empty(heads, transport.size, per_rank * of_list)
        kept = (task.config.sink_tokens, task.config.local_blocks)
        passes.probe_mass(*scored, maximum, total, parts, lists.start * heads, lists.stop * heads, per_rank, *kept)
        # Head by head, each element by itself: the sum depends neither on ranks nor on the layout.
        mass = functools.reduce(torch.Tensor.add_, parts.unbind())
        received = transport.all_to_all(mass)
        if place + 1 < len(waves):
            _choose(task, tables, received, lists, ranked[:, place])

    def rank() -> Tensor:
        _choose(task, tables, received, waves[-1], ranked[:, -1])
        return task.gathered(ranked)

    return rank


def _scored(task: SelectionTask, tables: ProbeTables) -> tuple[Tensor | int | float, ...]:
    """What every pass over scores takes."""
    probe = task.shards.join_rows(task.query, tables.local_rows, tables.owned_rows, tables.num_probe_rows)
    lists = (tables.documents, tables.row_tiles, tables.key_tiles, tables.positions)
    return probe, task.key, *lists, tables.most_row_tiles, tables.mass_blocks, task.softmax_scale


def _choose(task: SelectionTask, tables: ProbeTables, mass: Tensor, wave: slice, ranked: Tensor) -> None:
    """Writes those lists of ``wave`` that this rank ranks to ``ranked`` ``[documents, lists per rank, ...]``."""
    config, layout, per_rank = task.config, task.shards.layout, ranked.shape[1]
    num_ranked = max(0, min(per_rank, wave.stop - wave.start - task.shards.transport.rank * per_rank))
    cuda.selection_passes().choose_by_budget(
        mass, tables.documents, tables.group_blocks, tables.block_order, ranked[:, :num_ranked],
        per_rank, tables.mass_blocks, tables.most_blocks, layout.seq_len, *task.widths,
        config.sink_tokens, config.local_blocks, config.max_vertical, config.max_slash, config.slash_run_length,
        config.vertical_top_p, config.slash_top_p,
    )  # fmt: skip
