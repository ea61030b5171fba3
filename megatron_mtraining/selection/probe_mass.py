"""Input of an estimator: the attention mass of a document's probe rows, for some of the lists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .budget import Selection, fold_sum


@dataclass(frozen=True, slots=True)
class ProbeMass:
    """Mass that probe rows put on each key, added up over the rows that lie in one query block.

    Sinks and the local blocks are taken out: their mass is 0. A *lane* is what one list is chosen for: a query head of
    a batch row, or with ``index_sharing="kv_group"`` the query heads of a key/value head, whose probabilities are added
    up. Blocks and columns are counted from the document's first block; columns outside the document have mass 0.
    """

    mass: Tensor
    """float32 or float64 ``[lanes, row_groups, blocks, block_size]``; a lane's total is at most its number of heads."""

    query_blocks: Tensor
    """int64 ``[row_groups]``, on the mass's device: the block in which each group of probe rows lies."""

    def columns(self) -> Tensor:
        """``[lanes, columns]``: mass of each key over all probe rows."""
        return fold_sum(self.mass, dim=1).flatten(1)

    def without(self, columns: Selection) -> ProbeMass:
        """Return the same with the mass of the chosen columns set to 0."""
        lanes, _, blocks, block_size = self.mass.shape
        taken = torch.zeros(lanes, blocks * block_size + 1, dtype=torch.bool, device=self.mass.device)
        # What is not chosen marks the spare column at the end.
        taken.scatter_(1, columns.items.where(columns.chosen, blocks * block_size), True)
        taken = taken[:, :-1].view(lanes, 1, blocks, block_size)
        return replace(self, mass=self.mass.masked_fill(taken, 0))

    def distances(self) -> Tensor:
        """``[lanes, blocks]``: mass of each block distance between a probe row and a key."""
        lanes, groups, blocks, _ = self.mass.shape
        pooled = fold_sum(self.mass, dim=3)
        distance = torch.arange(blocks, device=pooled.device)
        key_block = self.query_blocks[:, None] - distance
        by_distance = pooled.gather(2, key_block.clamp(min=0).expand(lanes, groups, blocks))
        return fold_sum(by_distance.masked_fill(key_block < 0, 0), dim=1)
