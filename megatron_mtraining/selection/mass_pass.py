"""Pass from a rank's scores of its own keys, for all heads, to the mass on all keys for the lists that it ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..config import MTrainingConfig
from ..shards import SequenceShards
from .budget import AttentionMass, fold_sum
from .plan import EstimatedDocument
from .scores import ProbeScores


@dataclass(frozen=True, slots=True, kw_only=True)
class MassPass:
    """Second pass over a document's scores, now that each row's softmax is known."""

    scores: ProbeScores
    """Scores of this rank's keys in the document."""

    maximum: Tensor
    """``[all lanes, rows]``: each row's maximum over the keys of all ranks."""

    weight: Tensor
    """``[all lanes, rows]``: factor of ``exp(score - maximum)``."""

    query_blocks: Tensor
    """int64 ``[row_groups]``, on the device: the block of each of the document's row groups."""

    visible: Tensor
    """int64 ``[blocks]``, on the device: the document's ``visible``."""

    block_order: Tensor
    """The document's ``block_order``, on the device."""

    document: EstimatedDocument
    config: MTrainingConfig
    shards: SequenceShards

    always_selected: tuple[int, int]
    """Sinks and local distances, whose mass is left out."""

    heads_per_list: int
    """Neighbouring lanes whose mass is added up."""

    def mass_of(self, lists: slice, *, lists_per_rank: int) -> AttentionMass:
        """Return mass on all keys for ``lists_per_rank`` lists: on rank r the r-th so many of ``lists``.

        Lists that are missing at the end have no mass.
        """
        ranks, size = self.shards.layout.cp_size, self.shards.layout.block_size
        groups, slots = len(self.document.row_groups), self.document.slots_per_rank
        parts = self.scores.query.new_zeros(ranks * lists_per_rank, groups, slots * size)
        first = self.document.local_offset
        self._write(parts[: lists.stop - lists.start, :, first : first + self.scores.key.shape[1]], lists)
        received = self.shards.transport.all_to_all(parts.view(ranks, lists_per_rank, groups, slots * size))
        blocks = received.view(ranks, lists_per_rank, groups, slots, size).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return AttentionMass(
            mass=blocks.index_select(2, self.block_order),
            query_blocks=self.query_blocks,
            visible=self.visible,
            document=self.document,
            num_heads=self.heads_per_list,
        )

    def _write(self, target: Tensor, lists: slice) -> None:
        """Write this rank's mass to ``target`` ``[lists, row groups, keys]``, sinks and local blocks left out."""
        heads = self.heads_per_list
        for members, keys, chunk in self.scores.chunks(slice(lists.start * heads, lists.stop * heads)):
            mass = chunk.sub_(self.maximum[members, :, None]).exp_().mul_(self.weight[members, :, None])
            place = slice(members.start // heads - lists.start, members.stop // heads - lists.start)
            for group, (_, rows) in enumerate(self.document.row_groups):
                of_heads = fold_sum(mass[:, rows], dim=1)
                target[place, group, keys] = fold_sum(of_heads.unflatten(0, (-1, heads)), dim=1)
        target.masked_fill_(self._is_always_selected(), 0)

    def _is_always_selected(self) -> Tensor:
        """bool ``[row groups, keys]``: sink or local block, keys after their row too where a distance is local."""
        sinks, local = self.always_selected
        positions = self.scores.key_positions
        key_blocks = positions // self.shards.layout.block_size - self.document.first_block
        distance = self.query_blocks[:, None] - key_blocks
        return (distance < local) | (positions < self.document.start + sinks)
