"""Balance of an index's work over the ranks and steps of a ring: pairs counted, nothing timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import invalid
from ..layout import SequenceLayout
from ..tensors import to_device
from ..types import BlockListIndex, VerticalSlashIndex
from .density import counted_slashes, counted_verticals, row_spans, tokens_per_block
from .list_pairs import pairs_by_owner, rank_lists

_RANKS_AT_ONCE = 128
"""Ranks whose keys are counted in one go: bounds what a count takes beside ranks x blocks."""


@dataclass(frozen=True, slots=True)
class RingWork:
    """Pairs that each rank computes, over all lists and rows; useful work, not what a kernel rounds up to.

    Where a group of heads shares a list, each of its heads has as many: imbalances are those of all heads.
    """

    slash: Tensor
    """int64 ``[cp_size, steps]``: slash pairs of each rank in each ring step."""

    vertical: Tensor
    """int64 ``[cp_size]``: vertical pairs of each rank, all of which it computes in the first ring step."""

    @property
    def worker_imbalance(self) -> float:
        """The busiest rank's pairs over the mean rank's: the slow-down if ranks wait for each other at the end only."""
        total = self.stages.sum(dim=1).double()
        return float(total.max() / total.mean())

    @property
    def step_imbalance(self) -> float:
        """The busiest rank's pairs of each step, added up, over the mean rank's: the slow-down of ranks in lockstep.

        Vertical pairs belong to the first step.
        """
        stages = self.stages.double()
        return float(stages.max(dim=0).values.sum() / stages.sum(dim=1).mean())

    @property
    def imbalance_of_steps(self) -> Tensor:
        """float64 ``[steps]``: the busiest rank's pairs of each step over the mean rank's; 1 in a step without work."""
        stages = self.stages.double()
        most, mean = stages.max(dim=0).values, stages.mean(dim=0)
        return torch.where(most > 0, most / mean, 1.0)

    @property
    def stages(self) -> Tensor:
        """int64 ``[cp_size, steps]``: all pairs of each rank in each ring step."""
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
    """Count the pairs of each rank and step, on the index's device; the host waits for the counts.

    Of block lists each rank counts its own with :func:`megatron_mtraining.metrics.pairs_by_owner`; all ranks' counts
    go to :func:`work_of_pairs`.

    Args:
        index: the global index.
        layout: which rank holds which block.
        source_ranks: for each rank and step the owners of its KV block: ``RingSchedule.source_ranks`` of every rank.
        cu_seqlens: int32 ``[documents + 1]``, for packed documents.

    Raises:
        ValueError: the layout's blocks are not the index's, or a rank does not compute every rank's keys exactly once.
    """
    return work_of_pairs(*rank_pairs(index, layout, cu_seqlens=cu_seqlens), source_ranks)


def rank_pairs(
    index: VerticalSlashIndex | BlockListIndex, layout: SequenceLayout, *, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Count the pairs of ranks, the same under every schedule, on the index's device.

    Arguments are those of :func:`ring_work`; ``index`` may be block lists of all blocks, as one device selects them.

    Returns:
        int64 ``[cp_size, cp_size]``, slash pairs (of block lists all pairs) by the rank of the query and of the key;
        int64 ``[cp_size]``, pairs that only a vertical covers, by the rank of the query.

    Raises:
        ValueError: the layout's blocks are not the index's.
    """
    if isinstance(index, BlockListIndex):
        of_ranks = (rank_lists(index, layout, cp_rank=rank) for rank in range(layout.cp_size))
        counted = (
            pairs_by_owner(lists, layout, cp_rank=rank, cu_seqlens=cu_seqlens) for rank, lists in enumerate(of_ranks)
        )
        pairs = torch.stack(list(counted))
        return pairs, torch.zeros_like(pairs[0])
    if layout.block_size != index.block_size:
        raise invalid("layout.block_size", f"the index's {index.block_size}", layout.block_size)
    pairs = index.vertical.new_zeros(layout.cp_size, layout.cp_size, dtype=torch.int64)
    vertical = index.vertical.new_zeros(layout.cp_size, dtype=torch.int64)
    owners = to_device(layout.owners(), index.vertical.device)
    tables = (counted_verticals(index, seq_len=layout.seq_len), counted_slashes(index, seq_len=layout.seq_len))
    for row, (start, stop) in enumerate(row_spans(index, seq_len=layout.seq_len, cu_seqlens=cu_seqlens)):
        if start < stop:
            span = _Span.of(start, stop, owners, index.block_size, layout.cp_size)
            pairs += span.slash_pairs(tables[1][row])
            vertical += span.vertical_pairs(tables[0][row], tables[1][row])
    return pairs, vertical


def work_of_pairs(
    pairs: Tensor, vertical: Tensor, source_ranks: Sequence[Sequence[Sequence[int]]] | Tensor
) -> RingWork:
    """Return the work of a ring whose pairs have been counted.

    Args:
        pairs: int64 ``[cp_size, cp_size]``: those that need the KV block, by the rank of the query and of the key.
        vertical: int64 ``[cp_size]``, by the rank of the query.
        source_ranks: as for :func:`ring_work`, or int64 ``[cp_size, steps, sources]``.

    Raises:
        ValueError: a rank does not compute every rank's keys exactly once.
    """
    cp_size = len(pairs)
    if len(source_ranks) != cp_size:
        raise invalid("source_ranks", f"one schedule for each of {cp_size} ranks", f"{len(source_ranks)} schedules")
    flat = [each.tolist() for each in source_ranks] if isinstance(source_ranks, Tensor) else source_ranks
    for rank, steps in enumerate(flat):
        found = sorted(source for step in steps for source in step)
        if found != list(range(cp_size)):
            raise invalid(f"source_ranks[{rank}]", f"every rank below {cp_size} once", found)
    sources = torch.as_tensor(source_ranks, device="cpu")
    return RingWork(pairs.cpu().gather(1, sources.flatten(1)).view_as(sources).sum(2), vertical.cpu())


@dataclass(frozen=True, slots=True)
class _Span:
    """The tokens of one row of the index, block by block."""

    start: int
    stop: int
    block_size: int
    tokens: Tensor  # int64 [blocks]: those of the span in each block
    by_rank: Tensor  # float64 [cp_size, blocks]: the same where the rank holds the block, else 0

    @classmethod
    def of(cls, start: int, stop: int, owners: Tensor, block_size: int, cp_size: int) -> _Span:
        tokens = tokens_per_block(start, stop, block_size=block_size, device=owners.device)
        held = owners[start // block_size :][: len(tokens)]
        by_rank = tokens.new_zeros(cp_size, len(tokens), dtype=torch.float64)
        by_rank.scatter_(0, held[None], tokens[None].double())
        return cls(start, stop, block_size, tokens, by_rank)

    def slash_pairs(self, slash: Tensor) -> Tensor:
        """int64 ``[cp_size, cp_size]``: slash pairs by the rank of the query and the rank of the key.

        Args:
            slash: int64 ``[num_lists, max_s]``; distances of ``blocks`` and more have no pair.
        """
        lists_at = self._marked(slash).sum(0)
        own_block = (self.by_rank * (self.by_rank + 1) / 2).sum(1) * lists_at[0]
        lists_at[0] = 0
        of_keys = (_convolve(ranks, lists_at) for ranks in self.by_rank.split(_RANKS_AT_ONCE))
        return (torch.cat([self.by_rank @ each.T for each in of_keys], 1) + own_block.diag()).long()

    def vertical_pairs(self, vertical: Tensor, slash: Tensor) -> Tensor:
        """int64 ``[cp_size]``: pairs that only a vertical covers, by the rank of the query.

        Args:
            vertical: int64 ``[num_lists, max_v]``; positions outside the span have no pair.
            slash: as in :meth:`slash_pairs`.
        """
        outside = (vertical < self.start) | (vertical >= self.stop)
        block = vertical // self.block_size - self.start // self.block_size
        columns = self._marked(block.masked_fill(outside, len(self.tokens)))
        distances = self._marked(slash)
        distances[:, 0] = 0  # covers a vertical's own block, which the earlier columns exclude
        until = columns.long().cumsum(1)  # of integers: torch has no deterministic sum of floats on CUDA
        only_vertical = until - columns - _convolve(columns, distances)
        return (self.by_rank @ only_vertical.sum(0)).long()

    def _marked(self, entries: Tensor) -> Tensor:
        """float64 ``[num_heads, blocks]``: count of each block number below ``blocks`` among ``entries``."""
        blocks = len(self.tokens)
        counts = self.by_rank.new_zeros(len(entries), blocks + 1)
        ones = counts.new_ones(()).expand(entries.shape)
        return counts.scatter_add_(1, entries.clamp(max=blocks), ones)[:, :blocks].contiguous()


def _convolve(first: Tensor, second: Tensor) -> Tensor:
    """Sum ``first[..., b - d] * second[..., d]`` over d, of whole numbers: exact, since sums stay below 2**40."""
    length = 2 * first.shape[-1]
    product = torch.fft.rfft(first, length) * torch.fft.rfft(second, length)
    return torch.fft.irfft(product, length)[..., : first.shape[-1]].round()
