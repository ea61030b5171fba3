"""Vertical-slash selection: key columns and block distances of every list, on one device or over a CP group.

The steps, each on all ranks and of a shape that the configuration fixes:

1. the probe rows of every document are assembled on all ranks;
2. each rank scores its own keys, and the softmax statistics are reduced;
3. the mass on each key, added up over the heads that share a list, is sent to the rank that ranks it, as many lists to
   each;
4. that rank chooses, and the chosen lists are gathered. (``fused`` gathers the thresholds of the verticals first, and
   sums the mass of distances over all ranks.)

Two modules take them: ``fused`` with CUDA kernels where they can, else ``reference`` in plain PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from ..ranks import is_first_rank_of_host
from ..request import AttentionRequest
from ..types import VerticalSlashIndex
from . import fused, reference
from .lists import every_distance, index_of_lists, list_widths, overwrite_rows
from .plan import EstimatedDocument, plan_documents
from .task import SelectionTask

_LOG = logging.getLogger(__name__)


def prepare(request: AttentionRequest) -> Callable[[], Callable[[], VerticalSlashIndex]]:
    """Plan the selection of every list from the attention of a few probe rows; see :mod:`megatron_mtraining.selection`.

    The estimator that ``config.estimator`` names chooses the probe rows, the budget that ``config.budget`` names the
    keys. With ``config.index_sharing="kv_group"`` the query heads that use one key/value head have one list: their
    attention probabilities on a key, each head's of its own softmax, are added up, and the choice is made once from the
    sums.
    Nothing waits for the device.

    Raises:
        ValueError: an estimator that asks for other rows than the document's.
    """
    widths = list_widths(request.config, request.spans, request.layout.seq_len)
    if not request.rows_differ:
        planned = _planned(request)
        return lambda: _score(request, planned, widths)
    rows = [request.of_row(row) for row in range(request.query.shape[0])]
    plans = [_planned(row) for row in rows]

    def score() -> Callable[[], VerticalSlashIndex]:
        ranks = [_score(row, planned, widths) for row, planned in zip(rows, plans, strict=True)]
        return lambda: _stacked([rank() for rank in ranks])

    return score


def _stacked(parts: list[VerticalSlashIndex]) -> VerticalSlashIndex:
    return parts[0].rebuild(*map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))


def _score(
    request: AttentionRequest, planned: tuple[EstimatedDocument, ...], widths: tuple[int, int]
) -> Callable[[], VerticalSlashIndex]:
    """Score the rows of a request that have a plan in common, or its documents; return the function that ranks."""
    if not planned:
        return lambda: every_distance(request, widths)
    task = SelectionTask(
        query=request.query,
        key=request.key,
        softmax_scale=request.softmax_scale,
        config=request.config,
        shards=request.shards,
        spans=request.planned_spans,
        planned=planned,
        widths=widths,
    )
    obstacle = fused.why_not(task)
    if obstacle is not None and request.config.backend != "reference":
        _log_reference(obstacle)
    rank = (fused if obstacle is None else reference).score(task)
    return lambda: _index_of(request, task, rank())


def _index_of(request: AttentionRequest, task: SelectionTask, lists: torch.Tensor) -> VerticalSlashIndex:
    chosen = index_of_lists(lists, task.widths, num_lists=request.num_lists, block_size=request.config.block_size)
    if chosen.rows == len(request.spans):
        return chosen
    index = every_distance(request, task.widths)
    overwrite_rows(index, [document.rows.start for document in task.planned], chosen)  # of one row each
    return index


def _planned(request: AttentionRequest) -> tuple[EstimatedDocument, ...]:
    """Return the documents to estimate."""
    batch, cp_rank = request.query.shape[0], request.groups.cp.rank
    return plan_documents(request.config, request.layout, cp_rank, batch, request.planned_spans)


@cache  # once for each reason, not once for each layer and step
def _log_reference(obstacle: str) -> None:
    if is_first_rank_of_host():
        _LOG.info("selection: reference. %s", obstacle)
