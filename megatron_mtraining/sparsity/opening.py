"""How every selection begins: its arguments are checked, and the ranks agree on them before they go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from ..config import MTrainingConfig, check_config
from ..layout import SequenceLayout
from ..tensors import check_query_and_key, checked_scale
from ..transport import Group, SoloTransport, as_transport
from ..transport.agreement import agree_on_plan, announcing_refusal
from ..types import Documents, VerticalSlashIndex
from .lists import blocks_touched, dense_index
from .shards import SequenceShards
from .valid_rows import checked_counts, is_text, valid_spans

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionCall:
    """The checked arguments of one selection on one rank."""

    query: Tensor
    """``[batch, local_len, num_heads, head_dim]``."""

    key: Tensor
    """``[batch, local_len, num_kv_heads, head_dim]``."""

    config: MTrainingConfig
    softmax_scale: float
    shards: SequenceShards

    documents: Documents | None
    """All documents of the call, where they are packed."""

    num_valid: tuple[int, ...] | None = None
    """Rows of every batch row, or of every document, that are not padding; None where nothing is padded."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First token and one past the last of every batch row, or of every document, without its padding."""
        whole = ((0, self.shards.layout.seq_len),) * self.query.shape[0]
        return valid_spans(whole if self.documents is None else self.documents.spans, self.num_valid)

    @property
    def rows_differ(self) -> bool:
        """Whether batch rows hold different numbers of rows that are not padding, so that each has its own plan."""
        return self.documents is None and self.num_valid is not None and len(set(self.num_valid)) > 1

    def of_row(self, row: int) -> SelectionCall:
        """The call of one batch row by itself."""
        if self.documents is not None:  # which are packed into one row
            return self
        one = slice(row, row + 1)
        count = None if self.num_valid is None else self.num_valid[one]
        return replace(self, query=self.query[one], key=self.key[one], num_valid=count)

    def without_padding(self) -> SelectionCall:
        """A call of one row with zeros for the queries and keys of padding, as behind the end of a sequence."""
        if self.num_valid is None:
            return self
        is_valid = is_text(self.shards.positions(self.query.device), self.documents, self.spans)
        is_padding = ~is_valid.view(1, -1, 1, 1)
        return replace(self, query=self.query.masked_fill(is_padding, 0), key=self.key.masked_fill(is_padding, 0))

    @property
    def num_lists(self) -> int:
        """Lists of an index in each row: query heads, or key/value heads."""
        return self.config.num_lists(num_heads=self.query.shape[2], num_kv_heads=self.key.shape[2])

    @property
    def attends_densely(self) -> bool:
        """Whether every document is short enough to attend densely."""
        return all(stop - start <= self.config.dense_below for start, stop in self.spans)

    def dense_index(self) -> VerticalSlashIndex:
        """The index that keeps every causal pair; of documents of padding alone, those of distance 0."""
        size, seq_len, device = self.config.block_size, self.shards.layout.seq_len, self.query.device
        if self.num_valid is None or 0 not in self.num_valid:
            sizes = {"num_heads": self.num_lists, "seq_len": seq_len, "block_size": size, "device": device}
            return VerticalSlashIndex.dense(rows=len(self.spans), **sizes)
        widths = (1, max(blocks_touched(*span, size) for span in self.spans))
        one = dense_index(self.spans, num_lists=1, config=self.config, seq_len=seq_len, device=device, widths=widths)
        return one.rebuild(*(table.expand(-1, self.num_lists, *table.shape[2:]) for table in one.tensors))


def open_selection(
    operation: str,
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None,
    layout: SequenceLayout | None,
    cp_group: Group | None,
    cu_seqlens: Tensor | None,
    num_valid: Tensor | None,
    plan: Callable[[SelectionCall], Plan],
    meanwhile: Callable[[], None] | None = None,
    calls_meanwhile: bool = True,
) -> tuple[SelectionCall, Plan]:
    """Checks the arguments of a public selection, called ``operation``, and compares them over the group.

    Args:
        operation: the public function's name; of all other arguments it says what they are.
        plan: what else may refuse the call, before the ranks meet.
        meanwhile: called as soon as they have. Every rank gives one, or none does.
        calls_meanwhile: False leaves the call to the selection, which knows a better time.

    Raises:
        ValueError: an argument does not fit; the sentence names it and the rule.
        RankMismatchError: ranks called with different arguments, or not all of them select.
    """
    group = None if cp_group is None else as_transport(cp_group)
    with announcing_refusal(group or SoloTransport(), query, key):
        check_query_and_key(query, key, packed=cu_seqlens is not None)
        check_config(config)
        shards = SequenceShards.of(query, block_size=config.block_size, layout=layout, cp_group=group)
        documents = None
        if cu_seqlens is not None:
            documents = Documents.from_cu_seqlens(cu_seqlens, seq_len=shards.layout.seq_len)
        whole = ((0, shards.layout.seq_len),) * query.shape[0] if documents is None else documents.spans
        call = SelectionCall(
            query=query,
            key=key,
            config=config,
            softmax_scale=checked_scale(softmax_scale, query.shape[3]),
            shards=shards,
            documents=documents,
            num_valid=checked_counts(num_valid, whole),
        )
        planned = plan(call)
    fields = _plan_fields(operation, call) | {"meanwhile": "None" if meanwhile is None else "given"}
    agree_on_plan(fields, shards.transport, device=query.device)
    if meanwhile is not None and calls_meanwhile:
        meanwhile()
    return call, planned


def _plan_fields(operation: str, call: SelectionCall) -> dict[str, object]:
    """The values behind :data:`megatron_mtraining.transport.agreement.PLAN_FIELDS`."""
    return {
        "operation": operation,
        "query.shape": tuple(call.query.shape),
        "key.shape": tuple(call.key.shape),
        "query.dtype": call.query.dtype,
        "layout": call.shards.layout,
        "softmax_scale": call.softmax_scale,
        "config": call.config,
        "cu_seqlens": None if call.documents is None else call.documents.bounds,
        "num_valid": call.num_valid,
    }
