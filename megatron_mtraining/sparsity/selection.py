"""Selects which keys each head, or each group of heads, keeps, on one device or over a context-parallel group.

The steps, each on all ranks and of a shape that the configuration fixes, once all ranks have agreed on the plan:

1. the probe rows of every document are assembled on all ranks;
2. each rank scores its own keys, and the softmax statistics are reduced;
3. the mass on each key, added up over the heads that share a list, is sent to the rank that ranks it, as many lists to
   each;
4. that rank chooses, and the chosen lists are gathered.

Two modules take them: ``fused`` with CUDA kernels where they can, else ``reference`` in plain PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..config import MTrainingConfig
from ..job import is_first_rank_of_host
from ..layout import SequenceLayout
from ..transport import Group
from ..types import VerticalSlashIndex
from . import fused, reference
from .lists import dense_index, index_of_lists, list_widths, overwrite_rows
from .opening import SelectionCall, open_selection
from .plan import EstimatedDocument, plan_documents
from .task import SelectionTask
from .valid_rows import Spans

_LOG = logging.getLogger(__name__)


@torch.no_grad()
def select_vertical_slash(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    cp_group: Group | None = None,
    cu_seqlens: Tensor | None = None,
    num_valid: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> VerticalSlashIndex:
    """Chooses the vertical columns and slash distances of every query head from the attention of a few probe rows.

    Documents (batch rows, without ``cu_seqlens``) of up to ``config.dense_below`` tokens get every distance. On longer
    ones the estimator named by ``config.estimator`` decides; ``last_window`` is Algorithm 1 of the MTraining paper.
    With ``config.index_sharing="kv_group"`` the query heads that use one key/value head have one list: their attention
    probabilities on a key, each head's of its own softmax, are added up, and the choice is made once from the sums.
    Nothing waits for the device except the reading of ``cu_seqlens`` and, in a group, the first call of each kind: it
    compares the ranks' plans before it goes on.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``; this rank's tokens when ``layout`` is given.
        key: ``[batch, seq, num_kv_heads, head_dim]``, likewise.
        config: budgets, caps, estimator and block size.
        softmax_scale: the attention's own; default ``head_dim ** -0.5``.
        layout: which rank holds which tokens; given together with ``cp_group``.
        cp_group: the context-parallel process group, or any :class:`~megatron_mtraining.transport.base.Transport`.
        cu_seqlens: int32 ``[documents + 1]`` over the global sequence, for packed documents; ``batch`` is then 1.
        num_valid: int32 or int64 ``[batch]``, or with ``cu_seqlens`` ``[documents]``: tokens of each before padding.
            Padding stands at the end and chooses no key: what the others keep is what they would keep without it. A row
            of padding alone keeps distance 0. Default: nothing is padded. Reading it off a device waits for it.
        meanwhile: called once, after ranks have agreed on the plan, where it disturbs least: what depends on no index
            may set off there, as :meth:`megatron_mtraining.ring.RingStart.post` does. That is when all keys have been
            scored, since ranking keeps few multiprocessors busy.

    Returns:
        The index over the global sequence, the same on every rank; ``num_heads`` lists in a row, or ``num_kv_heads``.

    Raises:
        ValueError: an argument does not fit; the sentence names it and the rule.
        RankMismatchError: ranks called with different arguments, or not all of them select.
    """
    call, planned = open_selection(
        "select_vertical_slash",
        query,
        key,
        config,
        softmax_scale=softmax_scale,
        layout=layout,
        cp_group=cp_group,
        cu_seqlens=cu_seqlens,
        num_valid=num_valid,
        plan=_planned,
        meanwhile=meanwhile,
        calls_meanwhile=False,
    )
    if not call.rows_differ:
        return _index_of(call, planned, list_widths(config, call.spans), meanwhile)
    rows = [call.of_row(row) for row in range(query.shape[0])]
    last, widths = len(rows) - 1, list_widths(config, call.spans)
    parts = [_index_of(row, _planned(row), widths, meanwhile if i == last else None) for i, row in enumerate(rows)]
    return parts[0].rebuild(*map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))


def _index_of(
    call: SelectionCall,
    planned: tuple[EstimatedDocument, ...],
    widths: tuple[int, int],
    meanwhile: Callable[[], None] | None,
) -> VerticalSlashIndex:
    """The index of all rows of a call that have a plan in common, or of its documents."""
    config, spans, num_lists = call.config, call.spans, call.num_lists
    sizes = {"config": config, "seq_len": call.shards.layout.seq_len, "device": call.query.device, "widths": widths}
    if not planned:
        if meanwhile is not None:
            meanwhile()
        return dense_index(spans, num_lists=num_lists, **sizes)
    task = SelectionTask(
        query=call.query,
        key=call.key,
        softmax_scale=call.softmax_scale,
        config=config,
        shards=call.shards,
        spans=_planned_spans(call),
        planned=planned,
        widths=widths,
        meanwhile=meanwhile,
    )
    obstacle = fused.why_not(task)
    if obstacle is not None and config.backend != "reference":
        _log_reference(obstacle)
    chosen_lists = fused.chosen_lists if obstacle is None else reference.chosen_lists
    chosen = index_of_lists(chosen_lists(task), widths, num_lists=num_lists, block_size=config.block_size)
    if chosen.rows == len(spans):
        return chosen
    index = dense_index(spans, num_lists=num_lists, **sizes)
    overwrite_rows(index, [document.rows.start for document in planned], chosen)  # of one row each
    return index


def _planned(call: SelectionCall) -> tuple[EstimatedDocument, ...]:
    """The documents to estimate; refuses an estimator that nobody registered."""
    shards = call.shards
    return plan_documents(call.config, shards.layout, shards.transport.rank, call.query.shape[0], _planned_spans(call))


def _planned_spans(call: SelectionCall) -> Spans:
    """Those that are planned apart: of the documents, or the one that batch rows have in common."""
    return call.spans[:1] if call.documents is None else call.spans


@cache  # once for each reason, not once for each layer and step
def _log_reference(obstacle: str) -> None:
    if is_first_rank_of_host():
        _LOG.info("selection: reference. %s", obstacle)
