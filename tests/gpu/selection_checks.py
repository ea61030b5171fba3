"""What a selection in float32 must satisfy, judged by masses in float64 that share no code with the package."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.selection.naive import probe_rows
from megatron_mtraining.types import VerticalSlashIndex

TOLERANCE = 2e-5
"""Of a share of the mass, or of the ratio of two masses: some float32 roundings, and the exponential's own error."""


def check_lists(
    index: VerticalSlashIndex,
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float,
    bounds: tuple[int, ...] | None = None,
) -> None:
    """Every list holds what is always selected, and beside it what the budget rule allows on exact masses."""
    seq_len, num_heads = query.shape[1:3]
    num_blocks, group = -(-seq_len // config.block_size), num_heads // key.shape[2]
    share = group if config.index_sharing == "kv_group" else 1
    assert index.num_lists == num_heads // share
    for row, batch, start, stop in _spans(query, bounds):
        for number in range(index.num_lists):
            vertical = _entries(index.vertical[row, number], index.num_vertical[row, number], padding=seq_len)
            slash = _entries(index.slash[row, number], index.num_slash[row, number], padding=num_blocks)
            heads = slice(number * share, (number + 1) * share)
            keys = key[batch, :, heads.start // group]
            mass = _pair_mass(query[batch, :, heads], keys, start, stop, config, softmax_scale)
            check = _check_cost if config.budget == "cost" else _check_list
            check(mass, vertical, slash, start, stop, config, share, seq_len)


def _spans(query: Tensor, bounds: tuple[int, ...] | None) -> Iterator[tuple[int, int, int, int]]:
    """Index row, batch row, first token and end of each document."""
    if bounds is None:
        yield from ((row, row, 0, query.shape[1]) for row in range(query.shape[0]))
    else:
        yield from ((row, 0, *span) for row, span in enumerate(zip(bounds[:-1], bounds[1:], strict=True)))


def _entries(table: Tensor, count: Tensor, *, padding: int) -> Tensor:
    """The entries that count; ascending, and followed by padding alone."""
    entries, rest = table[: int(count)].long(), table[int(count) :]
    assert (entries[1:] > entries[:-1]).all() and (rest == padding).all()
    return entries


def _pair_mass(
    query: Tensor, key: Tensor, start: int, stop: int, config: MTrainingConfig, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Of ``[seq, heads, head_dim]`` query and one head's key, the rows' positions, and float64 ``[rows, tokens]``.

    These are mean probabilities, added up over the heads, 0 where a key is always selected.
    """
    rows = torch.tensor(probe_rows(start, stop, config), dtype=torch.int64, device=query.device)
    keys = torch.arange(start, stop, device=query.device)
    scores = softmax_scale * query[rows].double().transpose(0, 1) @ key[start:stop].double().T
    probability = scores.masked_fill(keys > rows[:, None], float("-inf")).softmax(-1).sum(0) / len(rows)
    distance = rows[:, None] // config.block_size - keys // config.block_size
    return probability.masked_fill((distance < config.local_blocks) | (keys < start + config.sink_tokens), 0), rows


def _check_list(
    mass: tuple[Tensor, Tensor],
    vertical: Tensor,
    slash: Tensor,
    start: int,
    stop: int,
    config: MTrainingConfig,
    num_heads: int,
    seq_len: int,
) -> None:
    pairs = mass[0]
    if _is_short_and_dense(vertical, slash, start, stop, config):
        return
    num_sinks, num_local = _check_always(vertical, slash, start, stop, config)
    shares = (1.0, 1.0) if config.budget == "fixed" else (config.vertical_top_p, config.slash_top_p)
    check_choice(pairs.sum(0), vertical[num_sinks:] - start, top_p=shares[0], at_most=config.max_vertical)
    num_distances = _num_blocks(start, stop, config.block_size)
    by_distance = _by_distance(mass, vertical, start, stop, config.block_size)
    _check_runs(by_distance, slash[num_local:] - num_local, num_distances - num_local, shares[1], config)


def _num_blocks(start: int, stop: int, size: int) -> int:
    return max(stop - 1, start) // size - start // size + 1


def _is_short_and_dense(vertical: Tensor, slash: Tensor, start: int, stop: int, config: MTrainingConfig) -> bool:
    """Return True if ``dense_below`` makes the list dense, and check that it is."""
    if stop - start > config.dense_below:
        return False
    assert len(vertical) == 0 and len(slash) == _num_blocks(start, stop, config.block_size)
    return True


def _check_always(vertical: Tensor, slash: Tensor, start: int, stop: int, config: MTrainingConfig) -> tuple[int, int]:
    """Return the numbers of sinks and of local distances, with which the lists begin."""
    num_sinks = min(config.sink_tokens, stop - start)
    num_local = min(config.local_blocks, _num_blocks(start, stop, config.block_size))
    assert torch.equal(vertical[:num_sinks], torch.arange(start, start + num_sinks, device=vertical.device))
    assert torch.equal(slash[:num_local], torch.arange(num_local, device=vertical.device))
    return num_sinks, num_local


def _by_distance(mass: tuple[Tensor, Tensor], without: Tensor | None, start: int, stop: int, size: int) -> Tensor:
    """float64 ``[blocks]``: mass of each distance, but for the columns at positions ``without``."""
    pairs, rows = mass
    left = pairs.clone()
    if without is not None:
        left[:, without - start] = 0
    distance = (rows[:, None] // size - torch.arange(start, stop, device=pairs.device) // size).clamp(min=0)
    by_distance = torch.zeros(_num_blocks(start, stop, size), dtype=torch.float64, device=pairs.device)
    return by_distance.index_add_(0, distance.flatten(), left.flatten())


# ---- the budget cost -------------------------------------------------------------------------------------------------


def _check_cost(
    mass: tuple[Tensor, Tensor],
    vertical: Tensor,
    slash: Tensor,
    start: int,
    stop: int,
    config: MTrainingConfig,
    num_heads: int,
    seq_len: int,
) -> None:
    """Columns by the joint ranking, and distances by that of what they leave, up to rounding near the thresholds."""
    if _is_short_and_dense(vertical, slash, start, stop, config):
        return
    pairs, rows = mass
    size, num_blocks = config.block_size, _num_blocks(start, stop, config.block_size)
    block = torch.arange(start, stop, device=pairs.device) // size - start // size
    farthest = rows // size - start // size
    visible = (farthest[:, None] >= torch.arange(num_blocks, device=pairs.device)).sum(0).clamp(min=1).double()
    columns, distances = pairs.sum(0), _by_distance(mass, None, start, stop, size)
    competing = columns if config.target_recall == 1 else _lesser_half(mass, size)
    column_rates, cap = competing / visible[block], -(-seq_len // 16)
    rates = torch.cat((column_rates, distances / (size * visible)))
    total = columns.sum()
    needed = total - (1 - config.target_recall) * num_heads if config.target_recall < 1 else None
    lowest, highest = _threshold(rates, torch.cat((competing, distances)), needed, total)
    if int((column_rates >= lowest).sum()) > cap:
        lowest = max(lowest, column_rates.topk(cap).values[-1])
        highest = max(highest, lowest)

    def bounds(columns_in: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rates of the distances beside these columns, and the bounds of the threshold."""
        left = _by_distance(mass, torch.cat((columns_in, always_columns)) + start, start, stop, size)
        remaining = None if needed is None else needed - columns[columns_in].sum()
        rates = left / (size * visible)
        return rates, *_threshold(rates, left, remaining, total)

    always_columns = torch.arange(min(config.sink_tokens, stop - start), device=pairs.device)
    always_distances = torch.arange(min(config.local_blocks, num_blocks), device=pairs.device)
    length = stop - start
    causal = length * (length + 1) // 2

    def computed(positions: Tensor, lines: Tensor) -> int:
        return min(int((stop - positions).sum() + ((num_blocks - lines) * size**2).sum()), causal)

    if config.max_density is None:
        exact = (column_rates >= highest) & (column_rates > 0)
        exact_rates, _, threshold = bounds(exact.nonzero().flatten())
        lines = ((exact_rates >= threshold) & (exact_rates > 0)).nonzero().flatten()
        positions = torch.cat((always_columns, exact.nonzero().flatten())) + start
        surplus = computed(positions, torch.cat((always_distances, lines))) - config.dense_above * causal
        slack = (len(columns) + len(distances) * size) * size  # a few lines near the thresholds
        if len(vertical) == 0 and len(slash) == num_blocks and surplus > -slack:
            return
        assert surplus <= slack and computed(vertical, slash) <= config.dense_above * causal
    num_sinks, num_local = _check_always(vertical, slash, start, stop, config)
    chosen = vertical[num_sinks:] - start
    assert len(chosen) <= cap
    check_by_rate(column_rates, chosen, lowest, highest)
    rates, lowest, highest = bounds(chosen)
    check_by_rate(rates, slash[num_local:], lowest, highest)


def _lesser_half(mass: tuple[Tensor, Tensor], size: int) -> Tensor:
    """float64 ``[tokens]``: twice the mass of that half of the rows which sees less; all of it for few query blocks."""
    pairs, rows = mass
    groups = (rows // size).unique(return_inverse=True)[1]
    if int(groups[-1]) < 7:
        return pairs.sum(0)
    return 2 * torch.minimum(pairs[groups % 2 == 0].sum(0), pairs[groups % 2 == 1].sum(0))


def _threshold(rates: Tensor, mass: Tensor, needed: Tensor | None, total: Tensor) -> tuple[Tensor, Tensor]:
    """Rates between which the last line is that is taken, where sums of mass are exact to TOLERANCE of the total."""
    values, order = rates.sort(descending=True)
    reached = mass[order].cumsum(0)
    zero = rates.new_zeros(())
    if needed is None:
        return zero, zero
    bounds = []
    for least in (needed + TOLERANCE * total, needed - TOLERANCE * total):
        if least <= 0:
            bounds.append(rates.new_tensor(float("inf")))
        else:
            taken = int((reached - mass[order] < least).sum())
            bounds.append(values[min(taken, len(values)) - 1])
    return bounds[0], bounds[1]


def check_by_rate(rates: Tensor, chosen: Tensor, lowest: Tensor, highest: Tensor) -> None:
    """``chosen`` are the lines down to a rate between ``lowest`` and ``highest``, and none without mass."""
    is_chosen = torch.zeros_like(rates, dtype=torch.bool)
    is_chosen[chosen] = True
    assert (rates[is_chosen] >= lowest * (1 - TOLERANCE)).all() and (rates[is_chosen] > 0).all()
    # Below the unit of the integer sums a mass may vanish.
    assert (rates[~is_chosen] <= (highest * (1 + TOLERANCE)).clamp(min=1e-15)).all()


# ---- the budgets top_p and fixed -------------------------------------------------------------------------------------


def _check_runs(by_distance: Tensor, chosen: Tensor, num_distances: int, top_p: float, config: MTrainingConfig) -> None:
    """``chosen`` distances, counted from the last local one, are whole runs, and these are chosen by their mass."""
    length = config.slash_run_length
    runs = (chosen // length).unique()
    members = (runs[:, None] * length + torch.arange(length, device=chosen.device)).flatten()
    assert torch.equal(chosen, members[members < num_distances])
    run = (torch.arange(len(by_distance), device=chosen.device) - config.local_blocks).clamp(min=0) // length
    by_run = torch.zeros(int(run.max()) + 1, dtype=torch.float64, device=chosen.device)
    by_run.index_add_(0, run, by_distance)  # local blocks have no mass
    check_choice(by_run, runs, top_p=top_p, at_most=config.max_slash // length)


def check_choice(mass: Tensor, chosen: Tensor, *, top_p: float, at_most: int) -> None:
    """``chosen`` is the fewest items with the most mass that reach the share, up to rounding, at most so many."""
    assert len(chosen) <= at_most
    others = mass.clone()
    others[chosen] = 0
    total, reached = mass.sum(), mass[chosen].sum()
    if len(chosen) < min(at_most, int((mass > 0).sum())):  # neither the cap nor the end of the items stopped it
        assert reached >= top_p * total * (1 - TOLERANCE)
    if len(chosen):
        least = mass[chosen].min()
        assert least >= others.max() * (1 - TOLERANCE)
        if top_p < 1:
            assert reached - least <= top_p * total * (1 + TOLERANCE)
