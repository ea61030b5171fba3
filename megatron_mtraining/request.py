"""The validated arguments of one call, which selection and ring read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .config import MTrainingConfig
from .layout import SequenceLayout
from .shards import SequenceShards
from .transport import RingTransports
from .types import AttentionIndex, Documents
from .valid_rows import Spans, is_text, valid_spans

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

    def without_padding(self) -> AttentionRequest:
        """Return this request of one row with zeros for padding, as behind the end of a sequence."""
        if self.num_valid is None:
            return self
        is_valid = is_text(self.shards.positions(self.query.device), self.documents, self.spans)
        is_padding = ~is_valid.view(1, -1, 1, 1)
        return replace(self, query=self.query.masked_fill(is_padding, 0), key=self.key.masked_fill(is_padding, 0))
