"""How evenly an index's work falls on the ranks and steps of a ring: pairs counted, nothing timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import invalid
from ..layout import SequenceLayout
from ..types import VerticalSlashIndex
from .lists import counted_slashes
from .spans import row_spans


@dataclass(frozen=True, slots=True)
class RingWork:
    """Pairs that each rank computes, over all heads and rows; useful work, not what a kernel rounds up to."""

    slash: Tensor
    """int64 ``[cp_size, steps]``: slash pairs of each rank in each ring step."""

    vertical: Tensor
    """int64 ``[cp_size]``: vertical pairs of each rank, all of which it computes in the first ring step."""

    @property
    def worker_imbalance(self) -> float:
        """The busiest rank's pairs over the mean rank's: the slow-down if ranks wait for each other at the end only."""
        total = self._stages().sum(dim=1).double()
        return float(total.max() / total.mean())

    @property
    def step_imbalance(self) -> float:
        """The busiest rank's pairs of each step, added up, over the mean rank's: the slow-down of ranks in lockstep.

        Vertical pairs belong to the first step.
        """
        stages = self._stages().double()
        return float(stages.max(dim=0).values.sum() / stages.sum(dim=1).mean())

    def _stages(self) -> Tensor:
        stages = self.slash.clone()
        stages[:, 0] += self.vertical
        return stages


def ring_work(
    index: VerticalSlashIndex,
    layout: SequenceLayout,
    source_ranks: Sequence[Sequence[Sequence[int]]],
    *,
    cu_seqlens: Tensor | None = None,
) -> RingWork:
    """Counts the pairs of each rank and step. Reads the index on the host.

    Args:
        index: the global index.
        layout: which rank holds which block.
        source_ranks: for each rank and step the ranks whose keys it meets: ``RingSchedule.source_ranks`` of every rank.
        cu_seqlens: int32 ``[documents + 1]``, for packed documents.

    Raises:
        ValueError: the layout's blocks are not the index's, or a rank does not meet every rank's keys exactly once.
    """
    if layout.block_size != index.block_size:
        raise invalid("layout.block_size", f"the index's {index.block_size}", layout.block_size)
    _check_sources(source_ranks, layout.cp_size)
    index = index.to("cpu")
    pairs = torch.zeros(layout.cp_size, layout.cp_size, dtype=torch.int64)
    vertical = torch.zeros(layout.cp_size, dtype=torch.int64)
    owners, slash = layout.owners(), counted_slashes(index, seq_len=layout.seq_len)
    for row, span in enumerate(row_spans(index, seq_len=layout.seq_len, cu_seqlens=cu_seqlens)):
        first_block, tokens = _tokens_per_block(*span, index.block_size)
        held = owners[first_block : first_block + len(tokens)]
        pairs += _slash_pairs(slash[row], tokens, held, layout.cp_size)
        vertical += _vertical_pairs(index, row, first_block, tokens, held, layout.cp_size)
    steps = [
        [sum(int(pairs[rank, source]) for source in step) for step in own] for rank, own in enumerate(source_ranks)
    ]
    return RingWork(torch.tensor(steps), vertical)


def _check_sources(source_ranks: Sequence[Sequence[Sequence[int]]], cp_size: int) -> None:
    if len(source_ranks) != cp_size:
        raise invalid("source_ranks", f"one schedule for each of {cp_size} ranks", f"{len(source_ranks)} schedules")
    for rank, steps in enumerate(source_ranks):
        met = sorted(source for step in steps for source in step)
        if met != list(range(cp_size)):
            raise invalid(f"source_ranks[{rank}]", f"every rank below {cp_size} once", met)


def _tokens_per_block(start: int, stop: int, block_size: int) -> tuple[int, Tensor]:
    """The first block that a span touches, and int64 ``[blocks]``: how many of its tokens are in each."""
    if start == stop:
        return 0, torch.zeros(0, dtype=torch.int64)
    edges = torch.arange(start // block_size, (stop - 1) // block_size + 2) * block_size
    return start // block_size, edges.clamp(start, stop).diff()


def _slash_pairs(slash: Tensor, tokens: Tensor, held: Tensor, cp_size: int) -> Tensor:
    """int64 ``[cp_size, cp_size]``: pairs of one row by the rank of the query and the rank of the key.

    Args:
        slash: int64 ``[num_heads, max_s]``; distances of ``blocks`` and more have no pair.
        tokens: int64 ``[blocks]``.
        held: int64 ``[blocks]``, the rank of each block.
        cp_size: number of ranks.
    """
    blocks = len(tokens)
    heads_with = torch.bincount(slash[slash < blocks], minlength=blocks)
    pairs = torch.zeros(cp_size * cp_size, dtype=torch.int64)
    for distance in heads_with.nonzero().flatten().tolist():
        query, key = slice(distance, blocks), slice(0, blocks - distance)
        area = tokens[query] * tokens[key] if distance else tokens * (tokens + 1) // 2
        pairs.index_add_(0, held[query] * cp_size + held[key], area * heads_with[distance])
    return pairs.view(cp_size, cp_size)


def _vertical_pairs(
    index: VerticalSlashIndex, row: int, first_block: int, tokens: Tensor, held: Tensor, cp_size: int
) -> Tensor:
    """int64 ``[cp_size]``: pairs of one row that only a vertical covers, by the rank of the query."""
    blocks = len(tokens)
    pairs = torch.zeros(cp_size, dtype=torch.int64)
    for head in range(index.num_heads):
        columns = index.vertical[row, head, : index.num_vertical[row, head]].long() // index.block_size - first_block
        if not len(columns):
            continue
        per_block = torch.bincount(columns, minlength=blocks)
        # All later block rows of each vertical, less those that a slash covers; distance 0 covers its own.
        queries = (per_block.cumsum(0) - per_block) * tokens
        distances = index.slash[row, head, 1 : index.num_slash[row, head]].long()
        used = per_block.nonzero().flatten()
        covered = (used[:, None] + distances).flatten()
        count = per_block[used, None].expand(-1, len(distances)).flatten()[covered < blocks]
        covered = covered[covered < blocks]
        queries.index_add_(0, covered, -count * tokens[covered])
        pairs.index_add_(0, held, queries)
    return pairs
