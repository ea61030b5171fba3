"""Selection on CUDA kernels: some ten launches for all heads and documents, and nothing as large as the scores.

It chooses what ``reference`` chooses, up to how float32 rounds the mass. What it chooses does not depend on how keys
are spread over ranks, nor on the run: see docs/decisions/0009, 0020 and 0024.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends import cuda
from ..config import BUDGETS
from .budget import Cost, Fixed, TopP, most_pairs
from .estimators import SelectionRequest
from .probe_tables import ProbeTables, probe_tables

_SLOTS = 4
"""Integers of a row's sum: csrc/probe_sums.cuh."""

_MASS_BITS = 54
"""Mass is added up in units of ``2 ** -54``: csrc/probe_passes.h."""

_MOST_PARTS = 2**22
"""Parts of rows' sums, of 36 bytes each."""


def unsupported_reason(request: SelectionRequest) -> str | None:
    """Return why the reference takes a request and what would change that; None where the kernels take it."""
    config, query = request.config, request.query
    if config.backend == "reference":
        return "The backend is reference. Set another in MTrainingConfig."
    if type(BUDGETS.get(config.budget)) not in (Cost, TopP, Fixed):
        return f"The CUDA kernels do not have the budget {config.budget}. Set budget to cost, top_p or fixed for them."
    return cuda.why_unavailable(
        device=query.device, dtype=query.dtype, head_dim=query.shape[3], block_size=config.block_size
    )


def score(request: SelectionRequest) -> Callable[[], Tensor]:
    """Score as :func:`megatron_mtraining.selection.reference.score` does."""
    transport, tables = request.shards.transport, probe_tables(request)
    scored = _scored(request, tables)
    weights = _weights(request, tables, scored)
    of_list = tables.num_halves * tables.mass_blocks * request.config.block_size
    waves, per_rank = request.waves(transport.size * of_list)
    lists = _Lists.empty(request, len(waves), per_rank)
    choose_slashes: Callable[[], None] | None = None
    for number, wave in enumerate(waves):
        if choose_slashes is not None:
            choose_slashes()
        choose_slashes = _score_lists(request, tables, (*scored, weights), wave, lists.of_wave(number))

    def rank() -> Tensor:
        choose_slashes()
        chosen = lists.entries if lists.pairs is None else _bounded(request, tables, lists)
        return request.gathered(chosen)

    return rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """Lists that this rank chooses: ``[documents, waves, lists per rank, ...]``, or of one wave."""

    entries: Tensor
    """int32 ``[..., vertical width + 1 + slash width + 1]``: verticals, their count, slashes and their count."""

    rates: Tensor | None
    """float32 ``[..., vertical width + slash width]``: rate of each entry, where ``config.max_density`` applies."""

    pairs: Tensor | None
    """int64: pairs of each list, where ``config.max_density`` applies."""

    @classmethod
    def empty(cls, request: SelectionRequest, num_waves: int, per_rank: int) -> _Lists:
        """Return lists to write, of a request whose lists are chosen in waves."""
        is_bounded = request.config.max_density is not None and BUDGETS.get(request.config.budget).ranks_by_rate
        shape, width, device = (len(request.estimated), num_waves, per_rank), sum(request.widths), request.key.device
        return cls(
            entries=torch.empty(*shape, width + 2, dtype=torch.int32, device=device),
            rates=torch.zeros(*shape, width, device=device) if is_bounded else None,
            pairs=torch.zeros(shape, dtype=torch.int64, device=device) if is_bounded else None,
        )

    def of_wave(self, wave: int) -> _Lists:
        """Return a view of one wave."""
        views = (None if each is None else each[:, wave] for each in (self.entries, self.rates, self.pairs))
        return _Lists(**dict(zip(("entries", "rates", "pairs"), views, strict=True)))

    def first(self, count: int) -> _Lists:
        """Return a view of the first lists of one wave."""
        views = (None if each is None else each[:, :count] for each in (self.entries, self.rates, self.pairs))
        return _Lists(**dict(zip(("entries", "rates", "pairs"), views, strict=True)))


def _scored(request: SelectionRequest, tables: ProbeTables) -> tuple[Tensor | int | float | str, ...]:
    """Return the arguments that every pass over scores takes."""
    probe = request.shards.join_rows(request.query, tables.local_rows, tables.owned_rows, tables.num_probe_rows)
    lists = (tables.documents, tables.row_tiles, tables.key_tiles, tables.positions, tables.unit_blocks)
    sizes = (tables.most_row_tiles, tables.most_key_tiles, tables.mass_blocks, _num_splits(request, tables))
    return (
        probe,
        request.key,
        *lists,
        *sizes,
        request.softmax_scale,
        cuda.cuda_backend().family_on(request.query.device),
    )


def _num_splits(request: SelectionRequest, tables: ProbeTables) -> int:
    """Return the number of parts that the keys of a document are cut into. It changes no result."""
    batch, num_heads, num_kv_heads = request.query.shape[0], request.query.shape[2], request.key.shape[2]
    most = max(1, _MOST_PARTS // (tables.num_probe_rows * batch * num_heads))
    family = cuda.cuda_backend().family_on(request.query.device)
    multiprocessors = torch.cuda.get_device_properties(request.query.device).multi_processor_count
    groups = (num_heads // num_kv_heads, batch * num_kv_heads)
    return best_num_splits(tables.seen_key_tiles, *groups, most, family, multiprocessors)


@functools.lru_cache(maxsize=32)
def best_num_splits(
    seen_key_tiles: tuple[tuple[int, ...], ...],
    group: int,
    num_groups: int,
    most: int,
    family: str,
    multiprocessors: int,
) -> int:
    """Return the number of parts of the keys with which the waves of a pass's CTAs take the least time.

    Half a wave is added to them, as communication may have some multiprocessors.

    Args:
        seen_key_tiles: of every document, of every row tile: the key tiles that it sees.
        group: query heads of a key/value head.
        num_groups: key/value heads of all batch rows.
        most: parts at most.
        family: of the kernels. On Hopper a CTA has three row tiles and takes two key tiles at a time, else one of each.
        multiprocessors: of the device.
    """
    rows, step, ctas = (3, 2, 1) if family == "sm90" else (1, 1, 3)
    start = 3  # steps that could be taken until a CTA's first
    reach = []  # of every CTA of a part: the steps that its row tiles see, and all that any of the document's does
    for tiles in seen_key_tiles:
        for first in range(0, len(tiles) * group, rows):
            last = min(first + rows, len(tiles) * group) - 1
            seen = max(tiles[first // group : last // group + 1])
            reach.append((-(-seen // step), -(-max(tiles) // step)))

    def steps(splits: int) -> int:
        longest = max(-(-whole // splits) for _, whole in reach)
        active = sum(-(-seen * splits // whole) for seen, whole in reach if whole)
        waves = -(-active * num_groups // (multiprocessors * ctas))
        return (2 * waves + 1) * (longest + start)

    return min(range(1, min(most, 128) + 1), key=steps)


def _weights(request: SelectionRequest, tables: ProbeTables, scored: tuple[Tensor | int | float | str, ...]) -> Tensor:
    """Return float32 ``[heads, probe rows, 2]``: what makes a score a probability, from the keys of all ranks."""
    passes, transport = cuda.selection_passes(), request.shards.transport
    rows = (request.all_heads, tables.num_probe_rows)
    splits = _num_splits(request, tables)
    part_sums = torch.empty(_SLOTS, splits, *rows, dtype=torch.int64, device=request.key.device)
    part_exponents = part_sums.new_empty(splits, *rows, dtype=torch.int32)
    weights = part_sums.new_empty(*rows, 2, dtype=torch.float32)
    passes.probe_sums(*scored, part_exponents, part_sums)
    if transport.size == 1:
        passes.weights_of_parts(part_exponents, part_sums, tables.row_tiles, tables.positions, weights)
        return weights
    exponents = transport.all_reduce(part_exponents.amax(dim=0), op="max")
    sums = part_sums.new_empty(_SLOTS, *rows)
    passes.merge_sums(part_exponents, part_sums, exponents, sums)
    sums = transport.all_reduce(sums)
    passes.probe_weights(exponents, sums, tables.row_tiles, tables.positions, weights)
    return weights


def _score_lists(
    request: SelectionRequest,
    tables: ProbeTables,
    scored: tuple[Tensor | int | float | str, ...],
    wave: slice,
    lists: _Lists,
) -> Callable[[], None]:
    """Score the lists of ``wave`` and choose their verticals; return the function that chooses their slashes.

    Both write those lists that this rank chooses to ``lists`` ``[documents, lists per rank, ...]``.
    """
    passes, transport, config = cuda.selection_passes(), request.shards.transport, request.config
    budget, by_cost = BUDGETS.get(config.budget), isinstance(BUDGETS.get(config.budget), Cost)
    heads, per_rank, device = request.heads_per_list, lists.entries.shape[1], request.key.device
    first = transport.rank * per_rank
    count = max(0, min(per_rank, wave.stop - wave.start - first))
    own, chosen = slice(first, first + count), lists.first(count)
    of_heads = (wave.start * heads, wave.stop * heads)
    always = budget.always_selected(config)
    max_vertical, max_slash = config.max_vertical, config.max_slash  # cost has a cap of each document
    vertical_share, slash_share = (1.0, 1.0) if by_cost else budget.shares(config)
    run_length = 1 if by_cost else config.slash_run_length
    column_choices = (
        torch.empty(len(request.estimated), per_rank, 2, dtype=torch.int64, device=device) if by_cost else None
    )
    written = (
        *(tables.documents, tables.block_order, tables.visible_rows),
        *(chosen.entries, chosen.rates, column_choices, per_rank, tables.mass_blocks, tables.most_blocks),
        *(request.shards.layout.seq_len, *request.widths),
    )

    of_list = tables.mass_blocks * config.block_size
    mass = torch.empty(transport.size, tables.num_halves, per_rank * of_list, device=device)
    distances, of_columns = torch.zeros(
        2, transport.size * per_rank, tables.block_order.numel(), dtype=torch.int64, device=device
    )
    passes.probe_mass(*scored, mass, distances, heads, *of_heads, per_rank, *always, run_length)
    received = transport.all_to_all(mass) if transport.size > 1 else mass
    competing = transport.all_reduce(distances)[own]
    verticals = torch.empty(len(request.estimated), per_rank, 2, dtype=torch.int32, device=device)
    passes.choose_verticals(
        received, competing, *written, verticals, *always, max_vertical, vertical_share, _give_up(request)
    )
    thresholds = transport.all_gather(verticals) if transport.size > 1 else verticals[None]
    passes.probe_columns(
        *(*scored, mass, thresholds, of_columns, request.widths[0], tables.visible_rows if by_cost else None),
        *(heads, *of_heads, per_rank, *always, run_length),
    )

    def choose_slashes() -> None:
        without = transport.all_reduce(of_columns)[own]
        passes.choose_slashes(
            *(competing, without, *written, chosen.pairs, always[1]),
            *(max_slash, run_length, slash_share, config.dense_above),
        )

    return choose_slashes


def _give_up(request: SelectionRequest) -> int:
    """Return the mass that a list may miss, in units of ``2 ** -54``; -1 where it must have every line with mass."""
    missed = 1.0 - request.config.target_recall
    return math.floor(missed * request.heads_per_list * 2**_MASS_BITS) if missed > 0 else -1


# ---- max_density -----------------------------------------------------------------------------------------------------


def _bounded(request: SelectionRequest, tables: ProbeTables, lists: _Lists) -> Tensor:
    """Return the entries of ``lists`` without lines of the lowest rates, so that the layer holds ``max_density``."""
    transport, bounds = request.shards.transport, tables.documents.long()
    length, stop, num_blocks = bounds[:, 1] - bounds[:, 0], bounds[:, 1], bounds[:, 3]
    most = most_pairs(request.gathered(lists.pairs), (length * (length + 1) // 2)[:, None], request.config.max_density)
    waves, per_rank = lists.pairs.shape[1:]
    missing = waves * transport.size * per_rank - most.shape[1]  # lists of the last wave
    most = torch.nn.functional.pad(most, (0, missing)).unflatten(1, (waves, transport.size, per_rank))
    return without_lowest_rates(
        lists.entries,
        lists.rates,
        lists.pairs,
        widths=request.widths,
        most=most[:, :, transport.rank],
        stop=stop[:, None, None, None],
        num_blocks=num_blocks[:, None, None, None],
        paddings=(request.shards.layout.seq_len, request.shards.layout.num_blocks),
        block_size=request.config.block_size,
    )


def without_lowest_rates(
    entries: Tensor,
    rates: Tensor,
    pairs: Tensor,
    *,
    widths: tuple[int, int],
    most: Tensor,
    stop: Tensor,
    num_blocks: Tensor,
    paddings: tuple[int, int],
    block_size: int,
) -> Tensor:
    """Return lists that have their lines of the largest rates, as far as the pairs of these fit.

    Args:
        entries: int32 ``[..., vertical width + 1 + slash width + 1]``.
        rates: ``[..., vertical width + slash width]``: infinite for lines that stay in any case, 0 for padding.
        pairs: int64 ``[...]``: of each list, at most all causal ones.
        widths: of verticals and of slashes.
        most: int64 ``[...]``: pairs that a list may have.
        stop: int64, broadcast over the entries: the end of each list's document.
        num_blocks: int64, likewise: the number of its blocks.
        paddings: entries that do not count, of verticals and of slashes.
        block_size: tokens in a block.
    """
    vertical, _, slash, _ = entries.split((widths[0], 1, widths[1], 1), dim=-1)
    of_lines = torch.cat((stop - vertical, (num_blocks - slash) * block_size**2), dim=-1).where(rates > 0, 0)
    order = rates.sort(dim=-1, descending=True, stable=True).indices
    fits = (of_lines.gather(-1, order).cumsum(dim=-1) <= most[..., None]) | (pairs <= most)[..., None]
    fits = torch.empty_like(fits).scatter_(-1, order, fits)
    fits = (fits & (rates > 0)) | rates.isinf()
    tables = []
    for table, chosen, padding in zip((vertical, slash), fits.split(widths, dim=-1), paddings, strict=True):
        tables += [
            table.where(chosen, padding).sort(dim=-1).values,
            chosen.sum(dim=-1, keepdim=True, dtype=torch.int32),
        ]
    return torch.cat(tables, dim=-1)
