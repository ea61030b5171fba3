"""Vertical-slash selection as its definition reads: float64, dense, slow, one device. The oracle of its tests.

It shares no code with the rest of the package, and reads a configuration's fields only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import MTrainingConfig

Lists = list[tuple[list[int], list[int]]]
"""Verticals and slash distances of each list."""

Line = tuple[float, int, int]
"""Rate, kind (0 a column, 1 a distance) and position or distance."""


def probe_rows(start: int, stop: int, config: MTrainingConfig) -> list[int]:
    """Return the rows that both shipped estimators score in tokens ``start`` to ``stop - 1``."""
    length, rows = stop - start, config.num_probe_rows
    if length <= rows:
        return list(range(start, stop))
    if config.estimator == "last_window":
        return list(range(stop - rows, stop))
    windows = config.num_probe_windows
    ends = [start + (i + 1) * length // windows for i in range(windows)]
    return [row for end in ends for row in range(end - rows // windows, end)]


@dataclass
class NaiveList:
    """One list of one document: the probabilities of its probe rows, and the lines that are selected by them."""

    probability: Tensor  # [rows, tokens], summed over the heads of the list, divided by the rows
    distance: Tensor  # [rows, tokens], in blocks
    start: int
    stop: int
    num_blocks: int
    block_size: int
    sinks: set[int]
    local: set[int]
    verticals: dict[int, float] = field(default_factory=dict)  # rate of each
    slashes: dict[int, float] = field(default_factory=dict)

    @property
    def causal(self) -> int:
        """Causal pairs."""
        return (self.stop - self.start) * (self.stop - self.start + 1) // 2

    def columns(self) -> dict[int, float]:
        """Return the mass of each key."""
        return dict(enumerate(self.probability.sum(0).tolist(), self.start))

    def columns_in_halves(self) -> list[dict[int, float]]:
        """Return the mass of each key over the rows of every other query block, twice; half of all of few blocks."""
        block = self.distance[:, 0].tolist()
        blocks = sorted(set(block))
        if len(blocks) < 8:
            return [{n: mass / 2 for n, mass in self.columns().items()}] * 2
        halves = (self.probability[[i for i, b in enumerate(block) if b in blocks[parity::2]]] for parity in (0, 1))
        return [dict(enumerate(half.sum(0).tolist(), self.start)) for half in halves]

    def distances(self, without: Iterable[int] = ()) -> dict[int, float]:
        """Return the mass of each block distance, but for some columns."""
        rest = self.probability.clone()
        rest[:, [position - self.start for position in without]] = 0
        masses = torch.zeros(self.num_blocks, dtype=torch.float64, device="cpu")
        masses.index_add_(0, self.distance.clamp(min=0).flatten(), rest.flatten())
        return dict(enumerate(masses.tolist()))

    def pairs(self, verticals: Iterable[int], slashes: Iterable[int]) -> int:
        """Return the pairs of columns and distances; those of both count twice."""
        of_columns = sum(self.stop - position for position in verticals)
        return of_columns + sum((self.num_blocks - d) * self.block_size**2 for d in slashes)

    def selected_pairs(self) -> int:
        """Return the pairs that the list computes, at most all."""
        always = self.pairs(self.sinks, self.local)
        return min(always + self.pairs(self.verticals, self.slashes), self.causal)


def until(lines: Sequence[Line], masses: Sequence[dict[int, float]], needed: float) -> list[Line]:
    """Return lines with mass by rate, ties in order, until their ``masses`` by kind reach ``needed``."""
    taken, reached = [], 0.0
    for rate, kind, line in sorted(lines, key=lambda each: (-each[0], *each[1:])):
        if reached >= needed or masses[kind][line] <= 0:
            break
        taken.append((rate, kind, line))
        reached += masses[kind][line]
    return taken


def select_by_cost(one: NaiveList, num_heads: int, config: MTrainingConfig) -> None:
    """Select columns and distances in one ranking by mass for each computed pair, until the target is reached."""
    size, first_block = config.block_size, one.start // config.block_size
    visible = [max(1, int((one.distance[:, 0] >= block).sum())) for block in range(one.num_blocks)]
    columns, distances = one.columns(), one.distances()
    needed = math.fsum(columns.values()) - (1 - config.target_recall) * num_heads
    everything = config.target_recall == 1

    def by_rate(masses: dict[int, float]) -> list[Line]:
        return [(mass / (size * visible[d]), 1, d) for d, mass in masses.items()]

    halves = one.columns_in_halves()
    competing = columns if everything else {n: 2 * min(half[n] for half in halves) for n in columns}
    lines = [(mass / visible[n // size - first_block], 0, n) for n, mass in competing.items()] + by_rate(distances)
    taken = until(lines, (competing, distances), math.inf if everything else needed)
    one.verticals = {
        n: rate for rate, _, n in [line for line in taken if line[1] == 0][: -(-(one.stop - one.start) // 16)]
    }
    rest = one.distances(without=one.verticals)
    needed -= math.fsum(columns[n] for n in one.verticals)
    one.slashes = {d: rate for rate, _, d in until(by_rate(rest), ({}, rest), math.inf if everything else needed)}


def most_mass(masses: dict[int, float], share: float, at_most: int) -> list[int]:
    """Return items by mass until ``share`` of the total is reached; for a share of 1 all that have mass."""
    needed = math.inf if share == 1 else share * math.fsum(masses.values())
    return [item for _, _, item in until([(m, 0, item) for item, m in masses.items()], (masses,), needed)[:at_most]]


def select_by_algorithm_1(one: NaiveList, config: MTrainingConfig) -> None:
    """Select verticals until their share is reached, then distances, runs of them, from what the verticals leave."""
    is_literal = config.budget == "top_p_literal"
    shares = (1.0, 1.0) if config.budget == "fixed" else (config.vertical_top_p, config.slash_top_p)
    verticals = most_mass(one.columns(), shares[0], config.max_vertical)
    length, first = (1, 0) if is_literal else (config.slash_run_length, config.local_blocks)
    runs: dict[int, float] = {}
    for d, mass in one.distances(without=() if is_literal else verticals).items():
        if d >= first:
            runs[(d - first) // length] = runs.get((d - first) // length, 0.0) + mass
    chosen = most_mass(runs, shares[1], config.max_slash // length)
    slashes = {first + run * length + i for run in chosen for i in range(length)}
    one.verticals = dict.fromkeys(verticals, 0.0)
    one.slashes = {d: 0.0 for d in slashes if d < one.num_blocks}


def bound_density(lists: list[NaiveList], max_density: float) -> None:
    """Give every list the same density at most, so that all hold ``max_density``; drop lines of the lowest rates."""
    order = sorted(((one.selected_pairs(), one.causal) for one in lists), key=lambda each: each[0] / each[1])
    total, remaining, level = max_density * sum(one.causal for one in lists), sum(one.causal for one in lists), math.inf
    for pairs, causal in order:
        if pairs / causal > total / remaining:
            level = total / remaining
            break
        total, remaining = total - pairs, remaining - causal
    for one in lists:
        if one.selected_pairs() <= level * one.causal:
            continue
        lines = [(rate, 0, n) for n, rate in one.verticals.items()] + [(r, 1, d) for d, r in one.slashes.items()]
        used, one.verticals, one.slashes = one.pairs(one.sinks, one.local), {}, {}
        for rate, kind, line in sorted(lines, key=lambda each: (-each[0], *each[1:])):
            used += one.pairs((), (line,)) if kind else one.pairs((line,), ())
            if used > level * one.causal:
                break
            (one.slashes if kind else one.verticals)[line] = rate


def naive_selection(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    spans: Sequence[tuple[int, int, int]],
    softmax_scale: float | None = None,
) -> list[Lists]:
    """Return the lists of each span.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``.
        key: ``[batch, seq, num_kv_heads, head_dim]``.
        config: estimator, budget and sizes.
        spans: batch row, first token and one past the last of each document, without its padding.
        softmax_scale: default ``head_dim ** -0.5``.
    """
    _, _, num_heads, head_dim = query.shape
    group, size = num_heads // key.shape[2], config.block_size
    heads = group if config.index_sharing == "kv_group" else 1
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    by_cost, is_literal = config.budget == "cost", config.budget == "top_p_literal"
    sinks, local = (0, 0) if is_literal else (config.sink_tokens, config.local_blocks)
    result: list[list[tuple[list[int], list[int]] | NaiveList]] = []
    for row, start, stop in spans:
        num_blocks = 1 if stop == start else (stop - 1) // size - start // size + 1
        if stop - start <= config.dense_below:
            result.append([([], list(range(num_blocks)))] * (num_heads // heads))
            continue
        rows = torch.tensor(probe_rows(start, stop, config), device="cpu")
        token = torch.arange(start, stop, device="cpu")
        distance = rows[:, None] // size - token // size
        result.append([])
        for head in range(0, num_heads, heads):
            queries = query[row, rows, head : head + heads].double().transpose(0, 1)
            scores = scale * queries @ key[row, start:stop, head // group].double().T
            probability = scores.masked_fill(token > rows[:, None], -math.inf).softmax(-1).sum(0) / len(rows)
            probability[(distance < local) | (token < start + sinks)] = 0
            always = set(range(start, min(start + sinks, stop))), set(range(min(max(local, 1), num_blocks)))
            one = NaiveList(probability, distance, start, stop, num_blocks, size, *always)
            if by_cost:
                select_by_cost(one, heads, config)
            else:
                select_by_algorithm_1(one, config)
            result[-1].append(one)
    if by_cost and config.max_density is not None:
        bound_density([one for lists in result for one in lists if isinstance(one, NaiveList)], config.max_density)

    def final(one: tuple[list[int], list[int]] | NaiveList) -> tuple[list[int], list[int]]:
        if not isinstance(one, NaiveList):
            return one
        may_be_dense = by_cost and config.max_density is None
        if may_be_dense and one.selected_pairs() > config.dense_above * one.causal:
            return [], list(range(one.num_blocks))
        return sorted(one.sinks | set(one.verticals)), sorted(one.local | set(one.slashes))

    return [[final(one) for one in lists] for lists in result]
