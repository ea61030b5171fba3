"""Selection as its definition reads, in float64 with Python lists: dense, slow, sharing no code with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.types import VerticalSlashIndex

Lists = list[list[tuple[list[int], list[int]]]]
"""``[rows][num_lists]`` of (verticals, slash distances)."""


def most_mass(mass: dict[int, float], share: float, at_most: int) -> list[int]:
    """Items in order of mass, ties to the lower, until ``share`` of the total is reached."""
    ranked = sorted((item for item in mass if mass[item] > 0), key=lambda item: (-mass[item], item))
    target, taken, reached = share * math.fsum(mass.values()), [], 0.0
    for item in ranked[:at_most]:
        if share < 1 and reached >= target:
            break
        taken.append(item)
        reached += mass[item]
    return taken


def most_mass_in_runs(mass: dict[int, float], reach: int, config: MTrainingConfig) -> set[int]:
    """The distances up to ``reach`` of the runs that have the most mass together, no more than the cap has room for."""
    length, first = config.slash_run_length, config.local_blocks
    by_run: dict[int, list[float]] = {}
    for distance, share in mass.items():
        by_run.setdefault((distance - first) // length, []).append(share)
    runs = {run: math.fsum(shares) for run, shares in by_run.items()}
    chosen = most_mass(runs, config.slash_top_p, config.max_slash // length)
    members = {first + run * length + place for run in chosen for place in range(length)}
    return {distance for distance in members if distance <= reach}


def probe_rows(start: int, stop: int, config: MTrainingConfig) -> list[int]:
    """The rows that the two shipped estimators are documented to look at."""
    length = stop - start
    if length <= config.window:
        return list(range(start, stop))
    if config.estimator == "last_window":
        return list(range(stop - config.window, stop))
    pieces = config.num_probe_windows
    ends = [start + (i * length) // pieces for i in range(1, pieces + 1)]
    return [row for end in ends for row in range(end - config.window // pieces, end)]


def chosen_lists(
    queries: Tensor, key: Tensor, start: int, stop: int, config: MTrainingConfig, scale: float
) -> tuple[list[int], list[int]]:
    """(verticals, slash distances) of the heads of ``[seq, heads, head_dim]`` queries together, on one head's keys."""
    size = config.block_size
    if stop == start:
        return [], [0]
    reach = (stop - 1) // size - start // size
    if stop - start <= config.dense_below:
        return [], list(range(reach + 1))
    rows = probe_rows(start, stop, config)
    scores = scale * (queries[rows].double().transpose(0, 1) @ key[start:stop].double().T)
    visible = torch.tensor([[k <= q for k in range(start, stop)] for q in rows])
    probability = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1).sum(0).tolist()
    sinks = set(range(start, min(start + config.sink_tokens, stop)))
    pairs = {
        (q, k): probability[i][k - start]
        for i, q in enumerate(rows)
        for k in range(start, q + 1)
        if k not in sinks and q // size - k // size >= config.local_blocks
    }
    by_column: dict[int, list[float]] = {}
    for (_, k), mass in pairs.items():
        by_column.setdefault(k, []).append(mass)
    columns = {k: math.fsum(masses) for k, masses in by_column.items()}
    verticals = set(most_mass(columns, config.vertical_top_p, config.max_vertical))
    by_distance: dict[int, list[float]] = {}
    for (q, k), mass in pairs.items():
        if k not in verticals:
            by_distance.setdefault(q // size - k // size, []).append(mass)
    distances = {d: math.fsum(masses) for d, masses in by_distance.items()}
    slashes = most_mass_in_runs(distances, reach, config)
    local = set(range(min(config.local_blocks, reach + 1)))
    return sorted(sinks | verticals), sorted(local | slashes)


def brute_force(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Lists:
    """What ``select`` must choose."""
    batch, seq_len, num_heads, head_dim = query.shape
    group = num_heads // key.shape[2]
    share = group if config.index_sharing == "kv_group" else 1
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if cu_seqlens is None:
        spans = [(row, 0, seq_len) for row in range(batch)]
    else:
        bounds = cu_seqlens.tolist()
        spans = [(0, *span) for span in zip(bounds[:-1], bounds[1:], strict=True)]
    return [
        [
            chosen_lists(query[row, :, head : head + share], key[row, :, head // group], start, stop, config, scale)
            for head in range(0, num_heads, share)
        ]
        for row, start, stop in spans
    ]


def lists_of(index: VerticalSlashIndex, *, seq_len: int) -> Lists:
    """The lists of an index, once its padding has been checked."""
    num_blocks = -(-seq_len // index.block_size)
    result: Lists = []
    for row in range(index.rows):
        result.append([])
        for head in range(index.num_lists):
            lists = []
            for table, count, padding in (
                (index.vertical, index.num_vertical, seq_len),
                (index.slash, index.num_slash, num_blocks),
            ):
                entries, used = table[row, head].tolist(), int(count[row, head])
                assert entries[used:] == [padding] * (len(entries) - used)
                assert entries == sorted(entries) and len(set(entries[:used])) == used
                lists.append(entries[:used])
            result[-1].append((lists[0], lists[1]))
    return result
