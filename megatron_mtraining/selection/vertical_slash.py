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
        plan=_planned,
        meanwhile=meanwhile,
        calls_meanwhile=False,
    )
    spans, seq_len, num_lists = call.spans, call.shards.layout.seq_len, call.num_lists
    if not planned:
        if meanwhile is not None:
            meanwhile()
        return dense_index(spans, num_lists=num_lists, config=config, seq_len=seq_len, device=query.device)
    task = SelectionTask(
        query=query,
        key=key,
        softmax_scale=call.softmax_scale,
        config=config,
        shards=call.shards,
        documents=call.documents,
        planned=planned,
        widths=list_widths(config, spans),
        meanwhile=meanwhile,
    )
    obstacle = fused.why_not(task)
    if obstacle is not None and config.backend != "reference":
        _log_reference(obstacle)
    chosen_lists = fused.chosen_lists if obstacle is None else reference.chosen_lists
    chosen = index_of_lists(chosen_lists(task), task.widths, num_lists=num_lists, block_size=config.block_size)
    if chosen.rows == len(spans):
        return chosen
    index = dense_index(spans, num_lists=num_lists, config=config, seq_len=seq_len, device=query.device)
    overwrite_rows(index, [document.rows.start for document in planned], chosen)  # of one row each
    return index


def _planned(call: SelectionCall) -> tuple[EstimatedDocument, ...]:
    """The documents to estimate; refuses an estimator that nobody registered."""
    shards = call.shards
    return plan_documents(call.config, shards.layout, shards.transport.rank, call.query.shape[0], call.documents)


@cache  # once for each reason, not once for each layer and step
def _log_reference(obstacle: str) -> None:
    if is_first_rank_of_host():
        _LOG.info("selection: reference. %s", obstacle)
