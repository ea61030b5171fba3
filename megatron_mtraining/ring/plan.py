"""Everything about a call that is not a tensor: settled once, then read by forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..backends.geometry import BlockGeometry
from ..backends.protocol import AttentionBackend
from ..layout import SequenceLayout
from ..layout.blocks import blocks_of
from ..tensors import kept_tensors
from ..types import Documents
from .rings import Rings
from .schedule import RingSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlan:
    """What one rank does in one call of ring attention."""

    layout: SequenceLayout
    """Where each block of the sequence lives."""

    documents: Documents | None
    """The packed documents, or None when each batch row is one document."""

    rings: Rings
    """The groups to communicate in."""

    schedule: RingSchedule
    """Whose keys to meet when."""

    backend: AttentionBackend
    """What computes a step."""

    softmax_scale: float
    """Factor of the scores."""

    _geometries: dict[tuple[int, ...], BlockGeometry] = field(init=False, repr=False, compare=False)
    """Those asked for by now, of all calls alike."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_geometries", _geometries_of(self.layout, self.documents, self.rings.cp.rank))

    def geometry(self, source_ranks: tuple[int, ...]) -> BlockGeometry:
        """The geometry of this rank's queries against the keys of ``source_ranks``, end to end.

        The same object for every layer and step, so that what is made of it can be found by its identity.
        """
        if source_ranks not in self._geometries:
            self._geometries[source_ranks] = BlockGeometry(
                seq_len=self.layout.seq_len,
                block_size=self.layout.block_size,
                query_blocks=blocks_of(self.layout, self.rings.cp.rank),
                key_blocks=blocks_of(self.layout, *source_ranks),
                documents=self.documents,
            )
        return self._geometries[source_ranks]

    @property
    def own_geometry(self) -> BlockGeometry:
        """The geometry of this rank's queries against its own keys."""
        return self.geometry((self.rings.cp.rank,))


@kept_tensors(maxsize=16)
def _geometries_of(
    layout: SequenceLayout, documents: Documents | None, cp_rank: int
) -> dict[tuple[int, ...], BlockGeometry]:
    """What one rank's calls on such a sequence have made; packed documents are others in every batch."""
    return {}
