"""Budgets: the choice of columns and block distances from the attention mass of the probe rows. Pluggable by name.

``cost`` ranks columns and distances together by the mass that they hold for each pair that they make attention compute,
and selects until ``config.target_recall`` of the mass is reached. ``top_p`` is Algorithm 1 of the MTraining paper with
sinks and local blocks of our own, ``top_p_literal`` its listing, ``fixed`` as many of each as asked for.

All are made of operations whose result in one position depends neither on the position nor on the run, and cumulative
sums are sums of integers: equal masses stay equal, and every rank and every recomputation picks the same items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import BUDGETS, MTrainingConfig
from .estimators import EstimatedDocument

_LOW_BITS = 0xFFFFFFFF

_UNIT_BITS = 54
"""Cumulative sums of mass count units of ``2 ** -54``, as the kernels do."""

LEAST_ROW_GROUPS = 8
"""``cost`` compares halves of the probe rows where these lie in so many query blocks."""

_TOKENS_PER_COLUMN = 16
"""``cost`` selects at most a column for each so many tokens of a document: a bound of memory that grows with it."""


class Selection(NamedTuple):
    """Items of each list, best first."""

    items: Tensor
    """int64 ``[..., count]``: positions along the last dimension of the mass; those that count are distinct."""

    chosen: Tensor
    """bool ``[..., count]``: True for items that count."""

    rate: Tensor | None = None
    """``[..., count]``: mass for each computed pair, where a budget ranks by it; never negative."""


def fold_sum(tensor: Tensor, dim: int) -> Tensor:
    """Sum over ``dim`` by halving, element-wise throughout: equal inputs give bitwise equal sums, wherever they are."""
    size = tensor.shape[dim]
    while size > 1:
        half = size // 2
        folded = tensor.narrow(dim, 0, half) + tensor.narrow(dim, half, half)
        if size % 2:
            folded.narrow(dim, 0, 1).add_(tensor.narrow(dim, size - 1, 1))
        tensor, size = folded, half
    return tensor.squeeze(dim)


def exclusive_sum(values: Tensor) -> Tensor:
    """Sum what stands before each element of the last dimension.

    Written as a scan by doubling because CUDA's ``cumsum`` of floats may differ from run to run.
    """
    total = F.pad(values, (1, 0))[..., :-1]
    step = 1
    while step < total.shape[-1]:
        total = torch.cat((total[..., :step], total[..., step:] + total[..., :-step]), dim=-1)
        step *= 2
    return total


def largest_first(mass: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest entries of the last dimension, descending; ties go to the lower position.

    A float32 mass is ranked by one integer, its bits above and the complement of its position below: unique keys make
    the unordered and unstable ``topk`` exact without sorting everything. A float64 mass does not fit and is sorted.

    Args:
        mass: float32 or float64 ``[..., items]``, non-negative.
        count: at most ``items``.

    Returns:
        The values, and their int64 positions.
    """
    if mass.dtype == torch.float64:
        values, items = mass.sort(dim=-1, descending=True, stable=True)
        return values[..., :count], items[..., :count]
    complement = _LOW_BITS - torch.arange(mass.shape[-1], device=mass.device)
    keys = mass.contiguous().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(complement)
    keys = keys.topk(count, dim=-1).values
    return (keys >> 32).int().view(torch.float32), _LOW_BITS - (keys & _LOW_BITS)


def select_top_p(mass: Tensor, *, top_p: float, at_most: int) -> Selection:
    """Return the smallest set of items with the most mass that reaches ``top_p`` of the total.

    An item counts when it has mass and what comes before it falls short of the share, so the one that crosses is in.
    ``top_p`` 1 takes every item that has mass, whatever rounding does to the total.

    Args:
        mass: float32 or float64 ``[..., items]``, non-negative.
        top_p: share of the total, in (0, 1].
        at_most: cap on the number of items; 0 selects none.
    """
    values, items = largest_first(mass, min(at_most, mass.shape[-1]))
    chosen = values > 0
    if top_p < 1.0:
        target = top_p * mass.sum(dim=-1, keepdim=True, dtype=torch.float64)
        chosen &= exclusive_sum(values.double()) < target
    return Selection(items, chosen)


def select_runs(mass: Tensor, *, first: int, run_length: int, top_p: float, at_most: int) -> Selection:
    """Apply :func:`select_top_p` to whole runs of neighbours, each judged by the mass of its items together.

    Args:
        mass: float32 or float64 ``[..., items]``, non-negative.
        first: item at which the first run begins; none before it is selected. The last run may be short.
        run_length: items in a run.
        top_p: share of the runs' mass, in (0, 1].
        at_most: cap on the number of items: no more runs than fit into it, a short one counted as a whole one.
    """
    num_items = mass.shape[-1]
    runs = mass[..., first:]
    runs = F.pad(runs, (0, -runs.shape[-1] % run_length)).unflatten(-1, (-1, run_length))
    selection = select_top_p(fold_sum(runs, dim=-1), top_p=top_p, at_most=at_most // run_length)
    offset = torch.arange(run_length, device=mass.device)
    items = (first + selection.items[..., None] * run_length + offset).flatten(-2)
    return Selection(items, selection.chosen.repeat_interleave(run_length, dim=-1) & (items < num_items))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMass:
    """Mass that the probe rows of a document put on each key, for some lists, added up over rows of one query block.

    The mass of a list is that of its query head, or with ``index_sharing="kv_group"`` of the query heads of a key/value
    head, whose probabilities are added up. Keys that are always selected are taken out: their mass is 0. Blocks and
    columns are counted from the document's first block; columns outside the document have mass 0.
    """

    mass: Tensor
    """float32 or float64 ``[lists, row_groups, blocks, block_size]``; a list's total is at most ``num_heads``."""

    query_blocks: Tensor
    """int64 ``[row_groups]``, on the mass's device: the block of each group of probe rows."""

    visible: Tensor
    """int64 ``[blocks]``, on the mass's device: probe rows that see block ``j``, and keys ``j`` blocks away."""

    document: EstimatedDocument

    num_heads: int
    """Query heads of a list."""

    def columns(self) -> Tensor:
        """``[lists, columns]``: mass of each key over all probe rows."""
        return fold_sum(self.mass, dim=1).flatten(1)

    def columns_in_halves(self) -> tuple[Tensor, Tensor]:
        """``[lists, columns]`` twice: mass of each key over the probe rows of every other query block.

        Probe rows that lie in fewer than 8 query blocks are no sample of the document: both are then half of the mass.
        """
        if self.mass.shape[1] < LEAST_ROW_GROUPS:
            half = self.columns() / 2
            return half, half
        first, second = (fold_sum(self.mass[:, parity::2], dim=1).flatten(1) for parity in (0, 1))
        return first, second

    def without(self, columns: Selection) -> AttentionMass:
        """Return the same with the mass of the chosen columns set to 0."""
        lists, _, blocks, block_size = self.mass.shape
        taken = torch.zeros(lists, blocks * block_size + 1, dtype=torch.bool, device=self.mass.device)
        # What is not chosen marks the spare column at the end.
        taken.scatter_(1, columns.items.where(columns.chosen, blocks * block_size), True)
        taken = taken[:, :-1].view(lists, 1, blocks, block_size)
        return replace(self, mass=self.mass.masked_fill(taken, 0))

    def distances(self) -> Tensor:
        """``[lists, blocks]``: mass of each block distance between a probe row and a key."""
        lists, groups, blocks, _ = self.mass.shape
        pooled = fold_sum(self.mass, dim=3)
        distance = torch.arange(blocks, device=pooled.device)
        key_block = self.query_blocks[:, None] - distance
        by_distance = pooled.gather(2, key_block.clamp(min=0).expand(lists, groups, blocks))
        return fold_sum(by_distance.masked_fill(key_block < 0, 0), dim=1)


class Choice(NamedTuple):
    """Columns and distances of each list beside those that are always selected."""

    vertical: Selection
    """Columns, counted as :class:`AttentionMass` does; as wide as the budget's cap allows."""

    slash: Selection
    """Block distances; as wide as the budget's cap allows."""


class Budget:
    """Budget of columns and distances. Stateless: every rank and every recomputation must agree."""

    reads: tuple[str, ...] = ("sink_tokens", "local_blocks", "max_vertical", "max_slash")
    """Fields of the configuration that this budget reads and another may not."""

    ranks_by_rate: bool = False
    """True if choices carry rates: then ``config.dense_above`` and ``config.max_density`` apply."""

    def always_selected(self, config: MTrainingConfig) -> tuple[int, int]:
        """Return the numbers of sinks and of local distances whose mass is taken out; distance 0 is in every list."""
        return config.sink_tokens, config.local_blocks

    def caps(self, config: MTrainingConfig, length: int) -> tuple[int, int]:
        """Return the most columns and distances beside those, in a document of ``length`` tokens."""
        return config.max_vertical, config.max_slash

    def choose(self, mass: AttentionMass, config: MTrainingConfig) -> Choice:
        """Choose columns and distances for each list.

        The widths of the result must depend on shapes and ``config`` only, so that the host need not wait.
        """
        raise NotImplementedError


class Cost(Budget):
    """Columns and distances in one ranking, by attention mass for each computed pair, until the target is reached.

    The rate of a line is its mass over the probe rows that can see it, and for a distance over ``block_size`` keys too.
    A column competes with twice the mass of the half of the probe rows that sees less of it: what one window alone
    looks at is no column of the document. Distances are then ranked again on the mass that the chosen columns leave.
    """

    reads = ("sink_tokens", "local_blocks", "target_recall", "max_density", "dense_above")
    ranks_by_rate = True

    def caps(self, config: MTrainingConfig, length: int) -> tuple[int, int]:
        """Return a column for every 16 tokens, and every distance of a document that begins anywhere in a block."""
        return -(-length // _TOKENS_PER_COLUMN), -(-length // config.block_size) + 1

    def choose(self, mass: AttentionMass, config: MTrainingConfig) -> Choice:
        """Choose the columns of the joint ranking, then distances for the mass that is still needed."""
        halves, distances = mass.columns_in_halves(), mass.distances()
        columns = halves[0] + halves[1]
        needed = _units(columns).sum(dim=1, keepdim=True)
        competing = columns
        if config.target_recall < 1.0:
            needed = needed - math.floor((1.0 - config.target_recall) * mass.num_heads * 2**_UNIT_BITS)
            competing = 2 * torch.minimum(*halves)
        block_size, rows = mass.mass.shape[3], mass.visible.clamp(min=1).to(columns.dtype)
        column_rate, rows_of_block = competing / rows.repeat_interleave(block_size), rows * block_size

        both = torch.cat((competing, distances), dim=1)
        _, items = largest_first(torch.cat((column_rate, distances / rows_of_block), dim=1), both.shape[1])
        taken = _until(both.gather(1, items), needed, config.target_recall)
        is_taken = torch.empty_like(taken).scatter_(1, items, taken)
        most_columns, _ = self.caps(config, mass.document.stop - mass.document.start)
        rate, items = largest_first(column_rate, min(most_columns, columns.shape[1]))
        vertical = Selection(items, is_taken.gather(1, items), rate)

        covered = _units(columns.gather(1, items)).where(vertical.chosen, 0).sum(dim=1, keepdim=True)
        residual = mass.without(vertical).distances()
        rate, items = largest_first(residual / rows_of_block, residual.shape[1])
        chosen = _until(residual.gather(1, items), needed - covered, config.target_recall)
        return Choice(vertical, Selection(items, chosen, rate))


class TopP(Budget):
    """Verticals until a share of the mass is reached, then distances from what they leave, each with its cap.

    Algorithm 1 of the MTraining paper, but for sinks and local blocks, whose mass is taken out first, and for the mass
    of the verticals, which is taken out before distances are ranked: these are ours.
    """

    reads = (*Budget.reads, "slash_run_length", "vertical_top_p", "slash_top_p")

    def choose(self, mass: AttentionMass, config: MTrainingConfig) -> Choice:
        """Choose verticals, then runs of ``config.slash_run_length`` distances; the first follows the local blocks."""
        vertical_share, slash_share = self.shares(config)
        vertical = select_top_p(mass.columns(), top_p=vertical_share, at_most=config.max_vertical)
        slash = select_runs(
            mass.without(vertical).distances(),
            first=config.local_blocks,
            run_length=config.slash_run_length,
            top_p=slash_share,
            at_most=config.max_slash,
        )
        return Choice(vertical, slash)

    def shares(self, config: MTrainingConfig) -> tuple[float, float]:
        """Return the shares of mass that verticals and distances must reach."""
        return config.vertical_top_p, config.slash_top_p


class Fixed(TopP):
    """The ``max_vertical`` columns with the most mass, and the ``max_slash`` distances with the most of the rest.

    Lines without mass are never selected.
    """

    reads = (*Budget.reads, "slash_run_length")

    def shares(self, config: MTrainingConfig) -> tuple[float, float]:
        """Return 1 and 1: the caps decide."""
        return 1.0, 1.0


class TopPLiteral(Budget):
    """Algorithm 1 as the MTraining paper lists it: all columns and all distances compete, each kind by itself.

    Neither sinks nor local blocks are taken out, and distances are ranked on the mass of all keys.
    """

    reads = ("max_vertical", "max_slash", "vertical_top_p", "slash_top_p")

    def always_selected(self, config: MTrainingConfig) -> tuple[int, int]:
        """Return no sinks and no local distances."""
        return 0, 0

    def choose(self, mass: AttentionMass, config: MTrainingConfig) -> Choice:
        """Choose verticals and distances, each from all the mass."""
        return Choice(
            select_top_p(mass.columns(), top_p=config.vertical_top_p, at_most=config.max_vertical),
            select_top_p(mass.distances(), top_p=config.slash_top_p, at_most=config.max_slash),
        )


def _units(mass: Tensor) -> Tensor:
    """int64: ``mass`` in units of ``2 ** -54``; 0 for NaN."""
    return (mass.double() * 2.0**_UNIT_BITS).nan_to_num_(nan=0.0).round().long()


def _until(mass: Tensor, needed: Tensor, target_recall: float) -> Tensor:
    """bool: items of a ranking that have mass and come before ``needed`` units are reached; for a target of 1 all."""
    if target_recall >= 1.0:
        return mass > 0
    units = _units(mass)
    return (mass > 0) & (units.cumsum(dim=1) - units < needed)


def causal_pairs(document: EstimatedDocument) -> int:
    """Return the pairs of a query and a key up to it in a document."""
    length = document.stop - document.start
    return length * (length + 1) // 2


def always_pairs(document: EstimatedDocument, sinks: int, local: int, block_size: int) -> int:
    """Return the pairs of the first ``sinks`` columns and ``local`` distances, those of both counted twice."""
    length, blocks = document.stop - document.start, document.num_blocks
    sinks, local = min(sinks, length), min(max(local, 1), blocks)
    of_sinks = sinks * length - sinks * (sinks - 1) // 2
    return of_sinks + (local * blocks - local * (local - 1) // 2) * block_size**2


def pairs_of_lines(choice: Choice, document: EstimatedDocument, block_size: int) -> tuple[Tensor, Tensor]:
    """int64: pairs of every column and of every distance of a choice; 0 where not chosen."""
    vertical, slash = choice.vertical, choice.slash
    stop = document.stop - document.first_block * block_size
    of_columns = (stop - vertical.items).where(vertical.chosen, 0)
    return of_columns, ((document.num_blocks - slash.items) * block_size**2).where(slash.chosen, 0)


def pairs_of_lists(choice: Choice, document: EstimatedDocument, always: int, block_size: int) -> Tensor:
    """int64 ``[lists]``: pairs that each list computes, at most all: an upper bound, as overlaps are counted twice."""
    lines = pairs_of_lines(choice, document, block_size)
    total = sum(each.sum(dim=1) for each in lines) + always
    return total.clamp(max=causal_pairs(document))


def most_pairs(pairs: Tensor, causal: Tensor, max_density: float) -> Tensor:
    """int64 ``[documents, lists]``: the most pairs of each list for which all lists together hold ``max_density``.

    Water filling: every list may have the same density, and what sparser lists do not use goes to the others. Lists
    that hold the bound are not limited.

    Args:
        pairs: int64 ``[documents, lists]``: what each list would compute.
        causal: int64 ``[documents, 1]``: causal pairs of a list.
        max_density: share of the causal pairs of all lists.
    """
    causal = causal.expand_as(pairs)
    density = (pairs.double() / causal.double()).flatten()
    density, order = density.sort(stable=True)
    of_list, causal_of_list = pairs.flatten()[order], causal.flatten()[order]
    sparser = of_list.cumsum(0) - of_list
    remaining = causal_of_list.flip(0).cumsum(0).flip(0)
    level = (remaining[0].double() * max_density - sparser.double()) / remaining.double()
    # The first list that is denser than the level from it on decides; the levels of those after it are lower.
    level = level.where(density > level, -1.0).amax()
    return (level * causal.double()).floor().long().where(level >= 0, causal)


def bounded(choice: Choice, most: Tensor, document: EstimatedDocument, always: int, block_size: int) -> Choice:
    """Return a choice without its lines of the lowest rates, as far as its lists exceed ``most`` pairs ``[lists]``."""
    vertical, slash = choice.vertical, choice.slash
    pairs = torch.cat(pairs_of_lines(choice, document, block_size), dim=1)
    chosen = torch.cat((vertical.chosen, slash.chosen), dim=1)
    rate = torch.cat((vertical.rate, slash.rate), dim=1).where(chosen, 0)
    _, items = largest_first(rate, rate.shape[1])
    fits = always + pairs.gather(1, items).cumsum(dim=1) <= most[:, None]
    fits |= (pairs_of_lists(choice, document, always, block_size) <= most)[:, None]
    chosen &= torch.empty_like(fits).scatter_(1, items, fits)
    widths = vertical.items.shape[1], slash.items.shape[1]
    of_columns, of_distances = chosen.split(widths, dim=1)
    return Choice(vertical._replace(chosen=of_columns), slash._replace(chosen=of_distances))


BUDGETS.register("cost", Cost())
BUDGETS.register("top_p", TopP())
BUDGETS.register("fixed", Fixed())
BUDGETS.register("top_p_literal", TopPLiteral())
