"""Vertical-slash selection as its definition reads: float64, dense, slow, one device. The oracle of its tests.

It shares no code with the rest of the package, and reads a configuration's fields only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import MTrainingConfig

Lists = list[tuple[list[int], list[int]]]
"""Verticals and slash distances of each list."""


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
class Document:
    """Probabilities of one list's probe rows in one document, and what is selected from them."""

    probability: Tensor  # [rows, tokens], summed over the heads of a list, divided by the rows
    distance: Tensor  # [rows, tokens] in blocks
    num_heads: int
    start: int
    stop: int
    block_size: int
    sinks: int
    local: int
    verticals: dict[int, float]  # position -> rate
    slashes: dict[int, float]  # distance -> rate

    @property
    def num_blocks(self) -> int:
        """Blocks that the document touches."""
        return (self.stop - 1) // self.block_size - self.start // self.block_size + 1

    @property
    def causal(self) -> int:
        """Causal pairs."""
        return (self.stop - self.start) * (self.stop - self.start + 1) // 2

    def columns(self) -> dict[int, float]:
        """Return the mass of each key."""
        return dict(enumerate(self.probability.sum(0).tolist(), self.start))

    def distances(self, without: Iterable[int] = ()) -> dict[int, float]:
        """Return the mass of each block distance, but for some columns."""
        rest = self.probability.clone()
        rest[:, [position - self.start for position in without]] = 0
        masses = torch.zeros(self.num_blocks, dtype=torch.float64)
        masses.index_add_(0, self.distance.clamp(min=0).flatten(), rest.flatten())
        return dict(enumerate(masses.tolist()))

    def visible(self, blocks: int) -> int:
        """Return the number of probe rows that see keys ``blocks`` away, or those of that block of the document."""
        farthest = self.distance[:, 0]
        return max(1, int((farthest >= blocks).sum()))

    def pairs(self, verticals: Iterable[int], slashes: Iterable[int]) -> int:
        """Return the pairs of columns and distances, those of both counted twice."""
        of_columns = sum(self.stop - position for position in verticals)
        return of_columns + sum((self.num_blocks - d) * self.block_size**2 for d in slashes)

    def always(self) -> tuple[set[int], set[int]]:
        """Return the sinks and the local distances."""
        sinks = range(self.start, min(self.start + self.sinks, self.stop))
        return set(sinks), set(range(min(max(self.local, 1), self.num_blocks)))

    def selected_pairs(self) -> int:
        """Return the pairs that the list computes, at most all."""
        always = self.always()
        return min(self.pairs(always[0], always[1]) + self.pairs(self.verticals, self.slashes), self.causal)


def until(ranked: Sequence[tuple[float, int, int]], mass: Sequence[dict[int, float]], needed: float) -> list:
    """Return ``(rate, kind, line)`` in order until their masses reach ``needed``, the crossing one included."""
    taken, reached = [], 0.0
    for rate, kind, line in sorted(ranked, key=lambda each: (-each[0], *each[1:])):
        if reached >= needed or mass[kind][line] <= 0:
            break
        taken.append((rate, kind, line))
        reached += mass[kind][line]
    return taken


def by_cost(document: Document, config: MTrainingConfig, seq_len: int) -> None:
    """Select columns and distances in one ranking by mass for each computed pair, until the target is reached."""
    size, first_block = config.block_size, document.start // config.block_size
    columns, distances = document.columns(), document.distances()
    column_rate = {n: mass / document.visible(n // size - first_block) for n, mass in columns.items()}
    cap, is_all = -(-seq_len // 16), config.target_recall == 1
    needed = math.fsum(columns.values()) - (1 - config.target_recall) * document.num_heads

    def rates(masses: dict[int, float]) -> list[tuple[float, int, int]]:
        return [(mass / (size * document.visible(d)), 1, d) for d, mass in masses.items()]

    ranked = [(rate, 0, n) for n, rate in column_rate.items()] + rates(distances)
    taken = until(ranked, (columns, distances), math.inf if is_all else needed)
    document.verticals = {n: rate for rate, kind, n in [each for each in taken if each[1] == 0][:cap]}
    rest = document.distances(document.verticals)
    needed -= math.fsum(columns[n] for n in document.verticals)
    taken = until(rates(rest), (columns, rest), math.inf if is_all else needed)
    document.slashes = {d: rate for rate, _, d in taken}


def most_mass(mass: dict[int, float], share: float, at_most: int) -> list[int]:
    """Return items by mass until ``share`` of the total is reached; for a share of 1 all that have mass."""
    needed = math.inf if share == 1 else share * math.fsum(mass.values())
    return [line for _, _, line in until([(m, 0, line) for line, m in mass.items()], (mass,), needed)[:at_most]]


def by_algorithm_1(document: Document, config: MTrainingConfig) -> None:
    """Select verticals until their share is reached, then distances, runs of them, from what the verticals leave."""
    is_fixed, is_literal = config.budget == "fixed", config.budget == "top_p_literal"
    shares = (1.0, 1.0) if is_fixed else (config.vertical_top_p, config.slash_top_p)
    verticals = most_mass(document.columns(), shares[0], config.max_vertical)
    length, first = (1, 0) if is_literal else (config.slash_run_length, config.local_blocks)
    runs: dict[int, float] = {}
    for d, mass in document.distances(() if is_literal else verticals).items():
        if d >= first:
            runs[(d - first) // length] = runs.get((d - first) // length, 0.0) + mass
    chosen = most_mass(runs, shares[1], config.max_slash // length)
    slashes = {first + run * length + i for run in chosen for i in range(length)}
    document.verticals = dict.fromkeys(verticals, 0.0)
    document.slashes = {d: 0.0 for d in slashes if d < document.num_blocks}


def bound(documents: list[Document], max_density: float) -> None:
    """Give every list the same density at most, so that all hold ``max_density``; drop lines of the lowest rates."""
    total = max_density * sum(each.causal for each in documents)
    order = sorted(documents, key=lambda each: each.selected_pairs() / each.causal)
    level = math.inf
    for number, each in enumerate(order):
        rest = total - sum(other.selected_pairs() for other in order[:number])
        share = rest / sum(other.causal for other in order[number:])
        if each.selected_pairs() / each.causal > share:
            level = share
            break
    for each in documents:
        if each.selected_pairs() <= level * each.causal:
            continue
        lines = [(rate, 0, n) for n, rate in each.verticals.items()] + [(r, 1, d) for d, r in each.slashes.items()]
        used, verticals, slashes = each.pairs(*each.always()), {}, {}
        for rate, kind, line in sorted(lines, key=lambda line: (-line[0], *line[1:])):
            used += each.pairs((), (line,)) if kind else each.pairs((line,), ())
            if used > level * each.causal:
                break
            (slashes if kind else verticals)[line] = rate
        each.verticals, each.slashes = verticals, slashes


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
    seq_len, num_heads, head_dim = query.shape[1:]
    group, size = num_heads // key.shape[2], config.block_size
    heads = group if config.index_sharing == "kv_group" else 1
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    literal = config.budget == "top_p_literal"
    sinks, local = (0, 0) if literal else (config.sink_tokens, config.local_blocks)
    estimated: list[Document] = []
    lists: list[list] = []
    for row, start, stop in spans:
        of_span: list = []
        for head in range(0, num_heads, heads):
            if stop - start <= config.dense_below:
                blocks = 1 if stop == start else (stop - 1) // size - start // size + 1
                of_span.append(([], list(range(blocks))))
                continue
            rows = torch.tensor(probe_rows(start, stop, config))
            token = torch.arange(start, stop)
            queries = query[row, rows, head : head + heads].double().transpose(0, 1)
            scores = scale * queries @ key[row, start:stop, head // group].double().T
            probability = scores.masked_fill(token > rows[:, None], -math.inf).softmax(-1).sum(0) / len(rows)
            distance = rows[:, None] // size - token // size
            probability[(distance < local) | (token < start + sinks)] = 0
            document = Document(probability, distance, heads, start, stop, size, sinks, local, {}, {})
            if config.budget == "cost":
                by_cost(document, config, seq_len)
            else:
                by_algorithm_1(document, config)
            estimated.append(document)
            of_span.append(document)
        lists.append(of_span)
    if config.budget == "cost" and config.max_density is not None:
        bound(estimated, config.max_density)
    return [[each if isinstance(each, tuple) else _final(each, config) for each in of_span] for of_span in lists]


def _final(document: Document, config: MTrainingConfig) -> tuple[list[int], list[int]]:
    may_be_dense = config.budget == "cost" and config.max_density is None
    if may_be_dense and document.selected_pairs() > config.dense_above * document.causal:
        return [], list(range(document.num_blocks))
    sinks, local = document.always()
    return sorted(sinks | set(document.verticals)), sorted(local | set(document.slashes))
