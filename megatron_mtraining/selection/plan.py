"""Plan of one selection, as host integers: the estimated documents, their probe rows, and the places of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from torch import Tensor

from ..config import MTrainingConfig
from ..errors import invalid
from ..layout import SequenceLayout
from ..shards import count_before
from ..tensors import cached_tensors
from ..valid_rows import Spans
from .estimators import get_estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedDocument:
    """A document longer than ``dense_below``, and the part of it that this rank holds."""

    rows: slice
    """Its rows of the index: every batch row, or the one row of a packed document."""

    start: int
    """Global position of its first token."""

    stop: int
    """One past its last token that is not padding."""

    probe_rows: tuple[int, ...]
    """Global positions of the query rows that it is judged by, ascending."""

    probes: slice
    """Places of those rows among the probe rows of all documents."""

    row_groups: tuple[tuple[int, slice], ...]
    """Query block, counted from ``first_block``, and place among ``probe_rows``, of the rows that share a block."""

    first_block: int
    """Global block that holds ``start``."""

    num_blocks: int
    """Blocks that the document touches."""

    local_tokens: slice
    """Its tokens among this rank's."""

    num_unmasked: int
    """Number of ``local_tokens`` that every probe row sees: those up to the first probe row."""

    slots_per_rank: int
    """The most of its blocks that any rank holds."""

    local_offset: int
    """Tokens between the start of its first block on this rank and ``local_tokens.start``."""

    block_order: Tensor
    """int64 ``[num_blocks]``, on the CPU: ``rank * slots_per_rank + slot`` of each block, slots from its first."""


@cached_tensors(maxsize=8)
def plan_documents(
    config: MTrainingConfig, layout: SequenceLayout, cp_rank: int, batch: int, spans: Spans
) -> tuple[EstimatedDocument, ...]:
    """Return the documents to estimate, in order. Kept for the next layers, which ask for the same.

    Args:
        config: the budget and the estimator.
        layout: which rank holds which tokens.
        cp_rank: this rank.
        batch: rows that have the plan in common where there is one span, and 1 where there are several.
        spans: of the documents, without their padding.
    """
    estimator, holdings = get_estimator(config.estimator), _Holdings(layout, cp_rank)
    planned: list[EstimatedDocument] = []
    num_probes = 0
    for row, (start, stop) in enumerate(spans):
        rows = slice(row, row + 1) if len(spans) > 1 else slice(0, batch)
        if stop - start <= config.dense_below:  # an empty document, too
            continue
        probe_rows = _checked_rows(estimator.probe_rows(start, stop, config), start, stop)
        planned.append(
            EstimatedDocument(
                rows=rows,
                start=start,
                stop=stop,
                probe_rows=probe_rows,
                probes=slice(num_probes, num_probes + len(probe_rows)),
                row_groups=_row_groups(probe_rows, start // layout.block_size, layout.block_size),
                **holdings.of(start, stop, probe_rows[0]),
            )
        )
        num_probes += len(probe_rows)
    return tuple(planned)


def _checked_rows(rows: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Check the rows that an estimator asks for; the rest of the selection relies on the order."""
    rows = tuple(rows)
    if not rows or rows[0] < start or rows[-1] >= stop or any(low >= high for low, high in pairwise(rows)):
        raise invalid("estimator.probe_rows", f"ascending in [{start}, {stop}), at least one", rows)
    return rows


def _row_groups(probe_rows: tuple[int, ...], first_block: int, block_size: int) -> tuple[tuple[int, slice], ...]:
    groups, first = [], 0
    for block, members in groupby(probe_rows, key=lambda row: row // block_size):
        last = first + len(tuple(members))
        groups.append((block - first_block, slice(first, last)))
        first = last
    return tuple(groups)


class _Holdings:
    """Places of the blocks of a span among the ranks."""

    def __init__(self, layout: SequenceLayout, cp_rank: int) -> None:
        self.layout, self.cp_rank = layout, cp_rank
        self.owners, self.slots = layout.owners(), layout.slots()
        self.blocks_by_rank = layout.blocks_by_rank()

    def of(self, start: int, stop: int, first_probe: int) -> dict[str, int | slice | Tensor]:
        """Return the fields of :class:`EstimatedDocument` for the places of tokens ``start`` to ``stop - 1``."""
        size = self.layout.block_size
        first_block, last_block = start // size, (stop - 1) // size
        first_slots = (self.blocks_by_rank < first_block).sum(dim=1)
        slots_per_rank = int(((self.blocks_by_rank <= last_block).sum(dim=1) - first_slots).max())
        owners = self.owners[first_block : last_block + 1]
        slots = self.slots[first_block : last_block + 1]
        low, high, seen = count_before(self.layout, self.cp_rank, (start, stop, first_probe + 1))
        return {
            "first_block": first_block,
            "num_blocks": last_block - first_block + 1,
            "local_tokens": slice(low, high),
            "num_unmasked": max(0, min(seen, high) - low),
            "slots_per_rank": slots_per_rank,
            "local_offset": low - int(first_slots[self.cp_rank]) * size if high > low else 0,
            "block_order": owners * slots_per_rank + slots - first_slots[owners],
        }
