"""The budget: the fewest items that hold a share of the mass, at most so many, ties to the lower position.

Pure functions on tensors of non-negative mass, made of operations whose result in one place depends neither on the
place nor on the run: equal masses stay equal, and every recomputation picks the same items.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_LOW_WORD = 0xFFFFFFFF


class Selection(NamedTuple):
    """Items of each lane, the most mass first."""

    items: Tensor
    """int64 ``[..., count]``: positions along the last dimension of the mass; those that count are distinct."""

    chosen: Tensor
    """bool ``[..., count]``: True for items that count."""


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
    complement = _LOW_WORD - torch.arange(mass.shape[-1], device=mass.device)
    keys = mass.contiguous().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(complement)
    keys = keys.topk(count, dim=-1).values
    return (keys >> 32).int().view(torch.float32), _LOW_WORD - (keys & _LOW_WORD)


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
    place = torch.arange(run_length, device=mass.device)
    items = (first + selection.items[..., None] * run_length + place).flatten(-2)
    return Selection(items, selection.chosen.repeat_interleave(run_length, dim=-1) & (items < num_items))
