"""What one selection has to do on one rank: the tensors, the plan, and how the heads are shared out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..config import MTrainingConfig
from ..types import Documents
from .plan import EstimatedDocument
from .scores import SCRATCH_ELEMENTS
from .shards import SequenceShards


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTask:
    """Everything that the lists of a call's estimated documents follow from."""

    query: Tensor
    """``[batch, local_len, num_heads, head_dim]``."""

    key: Tensor
    """``[batch, local_len, num_kv_heads, head_dim]``."""

    softmax_scale: float
    config: MTrainingConfig
    shards: SequenceShards

    documents: Documents | None
    """All documents of the call, where they are packed."""

    planned: tuple[EstimatedDocument, ...]
    """Those that are estimated; at least one."""

    widths: tuple[int, int]
    """Entries in a list of verticals and in one of slashes."""

    @property
    def num_lanes(self) -> int:
        """Query heads of all batch rows; lane ``b * num_heads + h``."""
        return self.query.shape[0] * self.query.shape[2]

    def waves(self, columns: int) -> tuple[list[slice], int]:
        """Cuts the lanes into waves, each ranked at one time, so that memory is bounded.

        Args:
            columns: values of mass that a lane takes.

        Returns:
            The lanes of each wave, and how many each rank gets: rank r the r-th so many of a wave.
        """
        ranks, lanes = self.shards.transport.size, self.num_lanes
        per_rank = max(1, min(-(-lanes // ranks), SCRATCH_ELEMENTS // columns))
        return [
            slice(first, min(first + ranks * per_rank, lanes)) for first in range(0, lanes, ranks * per_rank)
        ], per_rank

    def gathered(self, ranked: Tensor) -> Tensor:
        """``[documents, lanes, ...]`` on every rank, from each rank's ``[documents, waves, lanes_per_rank, ...]``."""
        parts = self.shards.transport.all_gather(ranked)
        return parts.permute(1, 2, 0, *range(3, parts.dim())).flatten(1, 3)[:, : self.num_lanes]
