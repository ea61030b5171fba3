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
    """Every list holds what is always kept, and beside it what the budget rule allows on exact masses."""
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
            _check_list(mass, vertical, slash, start, stop, config)


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

    These are mean probabilities, added up over the heads, 0 where a key is kept anyway.
    """
    rows = torch.tensor(probe_rows(start, stop, config), dtype=torch.int64, device=query.device)
    keys = torch.arange(start, stop, device=query.device)
    scores = softmax_scale * query[rows].double().transpose(0, 1) @ key[start:stop].double().T
    probability = scores.masked_fill(keys > rows[:, None], float("-inf")).softmax(-1).sum(0) / len(rows)
    distance = rows[:, None] // config.block_size - keys // config.block_size
    return probability.masked_fill((distance < config.local_blocks) | (keys < start + config.sink_tokens), 0), rows


def _check_list(
    mass: tuple[Tensor, Tensor], vertical: Tensor, slash: Tensor, start: int, stop: int, config: MTrainingConfig
) -> None:
    pairs, rows = mass
    size, device = config.block_size, pairs.device
    if stop - start <= config.dense_below:
        assert len(vertical) == 0 and len(slash) == (max(stop - 1, start) // size - start // size + 1)
        return
    num_sinks = min(config.sink_tokens, stop - start)
    num_local = min(config.local_blocks, (stop - 1) // size - start // size + 1)
    assert torch.equal(vertical[:num_sinks], torch.arange(start, start + num_sinks, device=device))
    assert torch.equal(slash[:num_local], torch.arange(num_local, device=device))
    check_choice(pairs.sum(0), vertical[num_sinks:] - start, top_p=config.vertical_top_p, at_most=config.max_vertical)
    left = pairs.clone()
    left[:, vertical - start] = 0
    distance = (rows[:, None] // size - torch.arange(start, stop, device=device) // size).clamp(min=0)
    by_distance = torch.zeros(int(distance.max()) + 1, dtype=torch.float64, device=device)
    by_distance.index_add_(0, distance.flatten(), left.flatten())
    num_distances = (stop - 1) // size - start // size + 1
    _check_runs(by_distance, slash[num_local:] - num_local, num_distances - num_local, config)


def _check_runs(by_distance: Tensor, chosen: Tensor, num_distances: int, config: MTrainingConfig) -> None:
    """``chosen`` distances, counted from the last local one, are whole runs, and these are chosen by their mass."""
    length = config.slash_run_length
    runs = (chosen // length).unique()
    members = (runs[:, None] * length + torch.arange(length, device=chosen.device)).flatten()
    assert torch.equal(chosen, members[members < num_distances])
    place = (torch.arange(len(by_distance), device=chosen.device) - config.local_blocks).clamp(min=0) // length
    by_run = torch.zeros(int(place.max()) + 1, dtype=torch.float64, device=chosen.device)
    by_run.index_add_(0, place, by_distance)  # local blocks have no mass
    check_choice(by_run, runs, top_p=config.slash_top_p, at_most=config.max_slash // length)


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
