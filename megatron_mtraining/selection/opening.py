"""How every selection begins: its arguments are checked, and the ranks agree on them before they go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ..config import MTrainingConfig, check_config
from ..layout import SequenceLayout
from ..tensors import check_query_and_key, checked_scale
from ..transport import Group, SoloTransport, as_transport
from ..transport.agreement import agree_on_plan, announcing_refusal
from ..types import Documents, VerticalSlashIndex
from .shards import SequenceShards

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

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First token and one past the last of every batch row, or of every document."""
        if self.documents is None:
            return ((0, self.shards.layout.seq_len),) * self.query.shape[0]
        return self.documents.spans

    @property
    def num_lists(self) -> int:
        """Lists of an index in each row: query heads, or key/value heads."""
        return self.config.num_lists(num_heads=self.query.shape[2], num_kv_heads=self.key.shape[2])

    @property
    def attends_densely(self) -> bool:
        """Whether every document is short enough to attend densely."""
        return all(stop - start <= self.config.dense_below for start, stop in self.spans)

    def dense_index(self) -> VerticalSlashIndex:
        """The index that keeps every causal pair."""
        return VerticalSlashIndex.dense(
            rows=len(self.spans),
            num_heads=self.num_lists,
            seq_len=self.shards.layout.seq_len,
            block_size=self.config.block_size,
            device=self.query.device,
        )


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
        call = SelectionCall(
            query=query,
            key=key,
            config=config,
            softmax_scale=checked_scale(softmax_scale, query.shape[3]),
            shards=shards,
            documents=None
            if cu_seqlens is None
            else Documents.from_cu_seqlens(cu_seqlens, seq_len=shards.layout.seq_len),
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
    }
