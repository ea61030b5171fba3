"""Estimators: the rows of each document that its attention is estimated from; and the request that a selection is.

Estimators are pluggable by name. Documents, their probe rows and the keys that each rank has are host integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor

from ..config import ESTIMATORS, MTrainingConfig
from ..errors import invalid
from ..layout import SequenceLayout
from ..request import SCRATCH_ELEMENTS, AttentionRequest, Spans, count_before
from ..tensors import cached_tensors


class Estimator(Protocol):
    """Estimator of a document's attention. Stateless: every rank and every recomputation must agree."""

    reads: tuple[str, ...]
    """Fields of the configuration that this estimator reads and another may not."""

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return rows to score in the document of tokens ``start`` to ``stop - 1``: global, ascending, at least one."""
        ...


class LastWindow:
    """The last ``config.num_probe_rows`` rows of the document (Algorithm 1 of the MTraining paper)."""

    reads = ("num_probe_rows",)

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return the document's last rows, all of them where there are fewer."""
        return tuple(range(max(start, stop - config.num_probe_rows), stop))


class ProbeWindows:
    """``config.num_probe_rows`` rows in ``config.num_probe_windows`` windows, spread evenly over the document.

    Every row counts the same, so that their mean estimates the mean over all rows of the document, which recall
    measures: a key that only the later half can see has half the weight, because half of the rows need it.
    """

    reads = ("num_probe_rows", "num_probe_windows")

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return the rows before each of the evenly spaced ends, all where the document has no more rows."""
        windows = config.num_probe_windows
        rows = config.num_probe_rows // windows
        if stop - start <= config.num_probe_rows:
            return tuple(range(start, stop))
        ends = (start + (stop - start) * (window + 1) // windows for window in range(windows))
        return tuple(row for end in ends for row in range(end - rows, end))


ESTIMATORS.register("last_window", LastWindow())
ESTIMATORS.register("probe_windows", ProbeWindows())


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedDocument:
    """A document longer than ``dense_below``, and the part of it that this rank has. Host integers."""

    rows: slice
    """Its rows of the index: every batch row, or the one row of a packed document."""

    start: int
    """Global position of its first token."""

    stop: int
    """One past its last token that is not padding."""

    probe_rows: tuple[int, ...]
    """Global positions of the query rows that its attention is estimated from, ascending."""

    probes: slice
    """Positions of those rows among the probe rows of all documents."""

    row_groups: tuple[tuple[int, slice], ...]
    """Query block, counted from ``first_block``, and positions among ``probe_rows``, of the rows that share a block."""

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

    @property
    def visible(self) -> Tensor:
        """int64 ``[num_blocks]``, on the CPU: probe rows that see block ``j``, and keys ``j`` blocks away."""
        rows = torch.zeros(self.num_blocks, dtype=torch.int64, device="cpu")
        for block, members in self.row_groups:
            rows[block] = members.stop - members.start
        return rows.flip(0).cumsum(0).flip(0)


@cached_tensors(maxsize=8)
def estimated_documents(
    config: MTrainingConfig, layout: SequenceLayout, cp_rank: int, batch: int, spans: Spans
) -> tuple[EstimatedDocument, ...]:
    """Return the documents to estimate, in order. Cached for the next layers.

    Args:
        config: the budget and the estimator.
        layout: which rank holds which tokens.
        cp_rank: this rank.
        batch: rows that have one span in common, and 1 where there are several.
        spans: of the documents, without their padding.
    """
    estimator, ownership = ESTIMATORS.get(config.estimator), _Ownership(layout, cp_rank)
    estimated: list[EstimatedDocument] = []
    num_probes = 0
    for row, (start, stop) in enumerate(spans):
        rows = slice(row, row + 1) if len(spans) > 1 else slice(0, batch)
        if stop - start <= config.dense_below:  # an empty document, too
            continue
        probe_rows = _checked_rows(estimator.probe_rows(start, stop, config), start, stop)
        estimated.append(
            EstimatedDocument(
                rows=rows,
                start=start,
                stop=stop,
                probe_rows=probe_rows,
                probes=slice(num_probes, num_probes + len(probe_rows)),
                row_groups=_row_groups(probe_rows, start // layout.block_size, layout.block_size),
                **ownership.of(start, stop, probe_rows[0]),
            )
        )
        num_probes += len(probe_rows)
    return tuple(estimated)


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


class _Ownership:
    """Ranks and slots of the blocks of a span."""

    def __init__(self, layout: SequenceLayout, cp_rank: int) -> None:
        self.layout, self.cp_rank = layout, cp_rank
        self.owners, self.slots = layout.owners(), layout.slots()
        self.blocks_by_rank = layout.blocks_by_rank()

    def of(self, start: int, stop: int, first_probe: int) -> dict[str, int | slice | Tensor]:
        """Return the fields of :class:`EstimatedDocument` for tokens ``start`` to ``stop - 1``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRequest(AttentionRequest):
    """A call, or one batch row of it, whose lists are to be chosen."""

    estimated: tuple[EstimatedDocument, ...]
    """Documents whose attention is estimated; at least one."""

    widths: tuple[int, int]
    """Entries in a list of verticals and in one of slashes."""

    @classmethod
    def of(
        cls, request: AttentionRequest, estimated: tuple[EstimatedDocument, ...], widths: tuple[int, int]
    ) -> SelectionRequest:
        """Return the request of a call."""
        given = {each.name: getattr(request, each.name) for each in fields(request)}
        return cls(**given, estimated=estimated, widths=widths)

    @property
    def all_heads(self) -> int:
        """Query heads of all batch rows; head ``h`` of row ``b`` is number ``b * num_heads + h``."""
        return self.query.shape[0] * self.query.shape[2]

    @property
    def all_lists(self) -> int:
        """Lists of all batch rows."""
        return self.query.shape[0] * self.num_lists

    @property
    def heads_per_list(self) -> int:
        """Query heads whose mass is added up before a list is chosen; they are neighbours."""
        return self.query.shape[2] // self.num_lists

    def waves(self, columns: int) -> tuple[list[slice], int]:
        """Cut the lists of all batch rows into waves, each chosen at one time, so that memory is bounded.

        Args:
            columns: values of mass that a list takes.

        Returns:
            The lists of each wave, and how many each rank gets: rank r the r-th so many of a wave.
        """
        ranks = self.shards.transport.size
        per_rank = max(1, min(-(-self.all_lists // ranks), SCRATCH_ELEMENTS // columns))
        starts = range(0, self.all_lists, ranks * per_rank)
        return [slice(first, min(first + ranks * per_rank, self.all_lists)) for first in starts], per_rank

    def gathered(self, chosen: Tensor) -> Tensor:
        """Gather ``[documents, lists, ...]`` on every rank from ``[documents, waves, lists_per_rank, ...]`` of each."""
        parts = self.shards.transport.all_gather(chosen)
        return parts.permute(1, 2, 0, *range(3, parts.dim())).flatten(1, 3)[:, : self.all_lists]
