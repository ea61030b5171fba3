"""Work of one selection on one rank: the tensors, the plan, and the sharing out of the lists."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..config import MTrainingConfig
from ..shards import SequenceShards
from ..valid_rows import Spans
from .plan import EstimatedDocument
from .scores import SCRATCH_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTask:
    """Input that determines the lists of a call's estimated documents."""

    query: Tensor
    """``[batch, local_len, num_heads, head_dim]``."""

    key: Tensor
    """``[batch, local_len, num_kv_heads, head_dim]``."""

    softmax_scale: float
    config: MTrainingConfig
    shards: SequenceShards

    spans: Spans
    """Spans of all documents that are packed, or of the batch rows, which have one in common; without padding."""

    planned: tuple[EstimatedDocument, ...]
    """Documents that are estimated; at least one."""

    widths: tuple[int, int]
    """Entries in a list of verticals and in one of slashes."""

    @property
    def lists_in_row(self) -> int:
        """Lists of one batch row."""
        return self.config.num_lists(num_heads=self.query.shape[2], num_kv_heads=self.key.shape[2])

    @property
    def heads_per_list(self) -> int:
        """Query heads whose mass is added up before a list is chosen; they stand side by side."""
        return self.query.shape[2] // self.lists_in_row

    @property
    def num_lanes(self) -> int:
        """Query heads of all batch rows; lane ``b * num_heads + h``."""
        return self.query.shape[0] * self.query.shape[2]

    def waves(self, columns: int) -> tuple[list[slice], int]:
        """Cut the lists of all batch rows into waves, each ranked at one time, so that memory is bounded.

        Args:
            columns: values of mass that a list takes.

        Returns:
            The lists of each wave, and how many each rank gets: rank r the r-th so many of a wave.
        """
        ranks, lists = self.shards.transport.size, self.query.shape[0] * self.lists_in_row
        per_rank = max(1, min(-(-lists // ranks), SCRATCH_ELEMENTS // columns))
        return [
            slice(first, min(first + ranks * per_rank, lists)) for first in range(0, lists, ranks * per_rank)
        ], per_rank

    def gathered(self, ranked: Tensor) -> Tensor:
        """Gather ``[documents, lists, ...]`` on every rank from ``[documents, waves, lists_per_rank, ...]`` of each."""
        parts = self.shards.transport.all_gather(ranked)
        lists = parts.permute(1, 2, 0, *range(3, parts.dim())).flatten(1, 3)
        return lists[:, : self.query.shape[0] * self.lists_in_row]
