"""The validated arguments of one call, which selection and ring read: tensors, parts of the ranks, padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .config import MTrainingConfig
from .errors import invalid
from .layout import SequenceLayout, blocks_of
from .tensors import cached_tensors, to_device
from .transport import RingTransports, Transport
from .types import AttentionIndex, Documents

Spans = tuple[tuple[int, int], ...]
"""First token and one past the last of every batch row, or of every document."""

SCRATCH_ELEMENTS = 2**23
"""Scores that a selection holds at once: 32 MiB in float32, however long the sequence is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """One call on one rank."""

    query: Tensor
    """``[batch, local_len, num_heads, head_dim]``."""

    key: Tensor
    """``[batch, local_len, num_kv_heads, head_dim]``."""

    value: Tensor | None
    """As ``key``; None where keys are only selected."""

    config: MTrainingConfig

    index: AttentionIndex | None
    """The caller's; None where the keys are to be selected."""

    layout: SequenceLayout
    """On one device that of one rank."""

    groups: RingTransports
    """The groups of ``config.schedule``."""

    softmax_scale: float
    """The caller's, or ``head_dim ** -0.5``."""

    documents: Documents | None
    """The packed documents, or None."""

    num_valid: tuple[int, ...] | None
    """Rows of every batch row, or of every document, that are not padding; None where nothing is padded."""

    @property
    def shards(self) -> SequenceShards:
        """The sequence as the ranks hold it."""
        return SequenceShards(self.layout, self.groups.cp)

    @property
    def spans(self) -> Spans:
        """First token and one past the last of every batch row, or of every document, without its padding."""
        whole = ((0, self.layout.seq_len),) * self.query.shape[0]
        return valid_spans(whole if self.documents is None else self.documents.spans, self.num_valid)

    @property
    def estimated_spans(self) -> Spans:
        """Spans that are estimated apart: those of the documents, or the one that batch rows have in common."""
        return self.spans[:1] if self.documents is None else self.spans

    @property
    def rows_differ(self) -> bool:
        """True if batch rows hold different numbers of rows that are not padding, so that each is estimated apart."""
        return self.documents is None and self.num_valid is not None and len(set(self.num_valid)) > 1

    @property
    def num_lists(self) -> int:
        """Lists in each row of an index: query heads, or key/value heads."""
        return self.config.num_lists(num_heads=self.query.shape[2], num_kv_heads=self.key.shape[2])

    @property
    def is_short(self) -> bool:
        """True if every document is short enough to attend densely."""
        return all(stop - start <= self.config.dense_below for start, stop in self.spans)

    def of_row(self, row: int) -> AttentionRequest:
        """Return the request of one batch row by itself."""
        if self.documents is not None:  # which are packed into one row
            return self
        one = slice(row, row + 1)
        count = None if self.num_valid is None else self.num_valid[one]
        return replace(self, query=self.query[one], key=self.key[one], value=None, num_valid=count)


@dataclass(frozen=True, slots=True)
class SequenceShards:
    """Tokens that each rank holds, and this rank's way to the others. One device is the case of one rank."""

    layout: SequenceLayout
    transport: Transport

    def positions(self, device: torch.device) -> Tensor:
        """int64 ``[local_len]`` on ``device``: global positions of this rank's tokens. Copies block numbers only."""
        blocks = blocks_of(self.layout, self.transport.rank)
        starts = to_device(blocks, device) * self.layout.block_size
        positions = (starts[:, None] + torch.arange(self.layout.block_size, device=device)).flatten()
        return positions[: self.layout.local_len]

    def assemble_rows(self, query: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Assemble rows of the global query, on every rank.

        Args:
            query: this rank's ``[batch, local_len, num_heads, head_dim]``.
            rows: global positions.

        Returns:
            ``[batch, len(rows), num_heads, head_dim]`` in the dtype of ``query``, joined bit for bit by one all-reduce
            whose shape depends on nothing but the number of rows.
        """
        owned, local = (
            to_device(positions, query.device) for positions in owned_rows(self.layout, self.transport.rank, rows)
        )
        return self.join_rows(query, local, owned, len(rows))

    def join_rows(self, query: Tensor, local: Tensor, owned: Tensor, count: int) -> Tensor:
        """Join rows as :meth:`assemble_rows` does, where the rows are on the device already.

        Args:
            query: this rank's.
            local: int64: the rows that it holds, among its tokens.
            owned: int64: their positions among all ``count`` rows.
            count: rows of all ranks.
        """
        held = query.index_select(1, local)
        if self.transport.size == 1:
            return held
        assembled = query.new_zeros(query.shape[0], count, *query.shape[2:])
        return self.transport.assemble(assembled.index_copy_(1, owned, held))


def count_before(layout: SequenceLayout, rank: int, positions: tuple[int, ...]) -> list[int]:
    """Count a rank's tokens that stand before each of some global positions."""
    blocks = blocks_of(layout, rank)
    counts = []
    for position in positions:
        whole, rest = divmod(position, layout.block_size)
        slot = int(torch.searchsorted(blocks, whole))
        in_block = rest if slot < len(blocks) and int(blocks[slot]) == whole else 0
        counts.append(min(slot * layout.block_size, layout.local_len) + in_block)
    return counts


@cached_tensors(maxsize=8)
def owned_rows(layout: SequenceLayout, rank: int, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the positions in ``rows``, on the CPU, of those that the rank holds, and among its tokens."""
    position = torch.tensor(rows, device="cpu")
    block, offset = position // layout.block_size, position % layout.block_size
    owned = (layout.owners()[block] == rank).nonzero().flatten()
    return owned, (layout.slots()[block] * layout.block_size + offset)[owned]


def checked_counts(num_valid: Tensor | None, spans: Spans) -> tuple[int, ...] | None:
    """Return the counts of ``num_valid`` on the host, which waits where they are on a device; None without padding.

    Args:
        num_valid: int32 or int64 ``[batch or documents]``.
        spans: of the same, with their padding.

    Raises:
        ValueError: another type or shape, or a count that is negative or longer than its row.
    """
    if num_valid is None:
        return None
    if not isinstance(num_valid, Tensor) or num_valid.dtype not in (torch.int32, torch.int64):
        got = num_valid.dtype if isinstance(num_valid, Tensor) else type(num_valid).__name__
        raise invalid("num_valid", "an int32 or int64 tensor", got)
    if num_valid.shape != (len(spans),):
        raise invalid("num_valid", f"of shape ({len(spans)},), a count for each row", tuple(num_valid.shape))
    counts = tuple(num_valid.tolist())
    for row, (count, (start, stop)) in enumerate(zip(counts, spans, strict=True)):
        if not 0 <= count <= stop - start:
            raise invalid(f"num_valid[{row}]", f"between 0 and {stop - start}, the tokens of its row", count)
    return None if all(count == stop - start for count, (start, stop) in zip(counts, spans, strict=True)) else counts


def valid_spans(spans: Spans, num_valid: tuple[int, ...] | None) -> Spans:
    """Return ``spans`` without the padding at their ends."""
    if num_valid is None:
        return spans
    return tuple((start, start + count) for (start, _), count in zip(spans, num_valid, strict=True))
