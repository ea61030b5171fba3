"""Selection on CUDA kernels: some fifteen launches for all heads and documents, and nothing as large as the scores.

It chooses what ``reference`` chooses, up to how float32 rounds the mass. What it chooses does not depend on how keys
are spread over ranks, nor on the run: see docs/decisions/0009 and 0020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..backends import cuda
from .budget import TopP, get_budget
from .probe_tables import TILE_ROWS, ProbeTables, probe_tables
from .task import SelectionTask

_SLOTS = 4
"""Integers that a row's sum is kept in: csrc/probe_sums.cuh."""

_WANTED_PARTS = 1024
"""CTAs of a pass in which rows stay: enough for every GPU to be filled several times over."""

_ROW_TILES_OF_CTA = 3
_LEAST_KEY_TILES = 16


def why_not(task: SelectionTask) -> str | None:
    """Return why the reference takes this task and what would change that; None where the kernels take it."""
    config, query = task.config, task.query
    if config.backend == "reference":
        return "The backend is reference. Set another in MTrainingConfig."
    if type(get_budget(config.budget)) is not TopP:
        return f"The CUDA kernels choose by the budget top_p, not by {config.budget}. Set budget to top_p for them."
    return cuda.why_unavailable(
        device=query.device, dtype=query.dtype, head_dim=query.shape[3], block_size=config.block_size
    )


def score(task: SelectionTask) -> Callable[[], Tensor]:
    """Score as :func:`megatron_mtraining.selection.reference.score` does."""
    transport, tables = task.shards.transport, probe_tables(task)
    scored = _scored(task, tables)
    weights = _weights(task, tables, scored)
    of_list = tables.mass_blocks * task.config.block_size
    waves, per_rank = task.waves(task.heads_per_list * transport.size * of_list)
    shape = (len(task.planned), len(waves), per_rank, sum(task.widths) + 2)
    ranked = weights.new_empty(shape, dtype=torch.int32)
    choose_slashes: Callable[[], None] | None = None
    for place, lists in enumerate(waves):
        if choose_slashes is not None:
            choose_slashes()
        choose_slashes = _score_lists(task, tables, (*scored, weights), lists, ranked[:, place])

    def rank() -> Tensor:
        choose_slashes()
        return task.gathered(ranked)

    return rank


def _scored(task: SelectionTask, tables: ProbeTables) -> tuple[Tensor | int | float | str, ...]:
    """Return the arguments that every pass over scores takes."""
    probe = task.shards.join_rows(task.query, tables.local_rows, tables.owned_rows, tables.num_probe_rows)
    lists = (tables.documents, tables.row_tiles, tables.key_tiles, tables.positions, tables.unit_blocks)
    sizes = (tables.most_row_tiles, tables.most_key_tiles, tables.mass_blocks, _num_splits(task, tables))
    return probe, task.key, *lists, *sizes, task.softmax_scale, cuda.cuda_backend().family_on(task.query.device)


def _num_splits(task: SelectionTask, tables: ProbeTables) -> int:
    """Return the number of parts that the keys of a document are cut into. It changes no result."""
    row_tiles = -(-tables.num_probe_rows // TILE_ROWS) * task.num_lanes // _ROW_TILES_OF_CTA
    return max(1, min(_WANTED_PARTS // max(1, row_tiles), tables.most_key_tiles // _LEAST_KEY_TILES))


def _weights(task: SelectionTask, tables: ProbeTables, scored: tuple[Tensor | int | float | str, ...]) -> Tensor:
    """Return float32 ``[lanes, probe rows, 2]``: what makes a score a probability, from the keys of all ranks."""
    passes, transport = cuda.selection_passes(), task.shards.transport
    rows = (task.num_lanes, tables.num_probe_rows)
    splits = _num_splits(task, tables)
    part_sums = torch.empty(_SLOTS, splits, *rows, dtype=torch.int64, device=task.key.device)
    part_exponents = part_sums.new_empty(splits, *rows, dtype=torch.int32)
    passes.probe_sums(*scored, part_exponents, part_sums)
    exponents = transport.all_reduce(part_exponents.amax(dim=0), op="max")
    sums = part_sums.new_empty(_SLOTS, *rows)
    passes.merge_sums(part_exponents, part_sums, exponents, sums)
    sums = transport.all_reduce(sums)
    weights = part_sums.new_empty(*rows, 2, dtype=torch.float32)
    passes.probe_weights(exponents, sums, tables.row_tiles, tables.positions, weights)
    return weights


def _score_lists(
    task: SelectionTask,
    tables: ProbeTables,
    scored: tuple[Tensor | int | float | str, ...],
    wave: slice,
    ranked: Tensor,
) -> Callable[[], None]:
    """Score the lists of ``wave`` and choose their verticals; return the function that chooses their slashes.

    Both write those lists that this rank ranks to ``ranked`` ``[documents, lists per rank, ...]``.
    """
    passes, transport, config = cuda.selection_passes(), task.shards.transport, task.config
    heads, per_rank, device = task.heads_per_list, ranked.shape[1], task.key.device
    first = transport.rank * per_rank
    num_ranked = max(0, min(per_rank, wave.stop - wave.start - first))
    lanes = (wave.start * heads, wave.stop * heads)
    kept = (config.sink_tokens, config.local_blocks)
    places = (tables.documents, tables.block_order, ranked[:, :num_ranked], per_rank, tables.mass_blocks)
    sizes = (tables.most_blocks, task.shards.layout.seq_len, *task.widths)

    of_list = tables.mass_blocks * config.block_size
    parts = torch.empty(heads, transport.size, per_rank * of_list, device=device)
    passes.probe_mass(*scored, parts, *lanes, per_rank, *kept)
    # Head by head, each element by itself: the sum depends neither on ranks nor on the layout.
    mass = functools.reduce(torch.Tensor.add_, parts.unbind())
    received = transport.all_to_all(mass) if transport.size > 1 else mass
    verticals = torch.empty(len(task.planned), per_rank, 2, dtype=torch.int32, device=device)
    passes.choose_verticals(
        received, *places, *sizes, verticals, *kept, config.max_vertical, config.vertical_top_p
    )  # fmt: skip
    thresholds = transport.all_gather(verticals) if transport.size > 1 else verticals[None]
    distances = torch.zeros(transport.size * per_rank, tables.block_order.numel(), dtype=torch.int64, device=device)
    passes.probe_distances(
        *scored, mass, thresholds, distances, heads, *lanes, per_rank, *kept, config.slash_run_length
    )  # fmt: skip

    def choose_slashes() -> None:
        total = transport.all_reduce(distances)
        passes.choose_slashes(
            total[first : first + num_ranked], *places, *sizes,
            config.local_blocks, config.max_slash, config.slash_run_length, config.slash_top_p,
        )  # fmt: skip

    return choose_slashes
