"""Vertical-slash selection: key columns and block distances of every list, on one device or over a CP group.

The steps, each on all ranks and of a shape that the configuration fixes:

1. the probe rows of every document (``estimators``) are assembled on all ranks;
2. each rank scores its own keys, and the softmax statistics are reduced;
3. the mass on each key, added up over the heads that share a list, is sent to the rank that chooses it, as many lists
   to each;
4. that rank chooses by the ``budget``, and the chosen lists are gathered. (``fused`` gathers the thresholds of the
   verticals first, and sums the mass of distances over all ranks.)

Two modules take them: ``fused`` with CUDA kernels where these can, else ``reference`` in plain PyTorch. ``naive`` is
the definition that both are tested against.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..config import BUDGETS, MTrainingConfig
from ..ranks import is_first_rank_of_host
from ..request import AttentionRequest
from ..tensors import to_device
from ..types import VerticalSlashIndex
from . import fused, reference
from .dense import blocks_touched, every_distance
from .estimators import EstimatedDocument, SelectionRequest, estimated_documents

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
    widths = list_widths(request.config, request.spans)
    if not request.rows_differ:
        estimated = _estimated(request)
        return lambda: _score(request, estimated, widths)
    rows = [request.of_row(row) for row in range(request.query.shape[0])]
    documents = [_estimated(row) for row in rows]

    def score() -> Callable[[], VerticalSlashIndex]:
        ranks = [_score(row, estimated, widths) for row, estimated in zip(rows, documents, strict=True)]
        return lambda: VerticalSlashIndex.concatenate([rank() for rank in ranks])

    return score


def _score(
    request: AttentionRequest, estimated: tuple[EstimatedDocument, ...], widths: tuple[int, int]
) -> Callable[[], VerticalSlashIndex]:
    """Score rows that have their span in common, or packed documents; return the function that ranks."""
    if not estimated:
        return lambda: every_distance(request, widths)
    selection = SelectionRequest.of(request, estimated, widths)
    reason = fused.unsupported_reason(selection)
    if reason is not None and request.config.backend != "reference":
        _log_reference(reason)
    rank = (fused if reason is None else reference).score(selection)
    return lambda: _index_of(selection, rank())


def _index_of(request: SelectionRequest, lists: Tensor) -> VerticalSlashIndex:
    """Return the index of ``lists`` ``[estimated documents, all lists, entries]``, and of documents that are short."""
    rows = lists.unflatten(1, (-1, request.num_lists)).flatten(0, 1)
    vertical_width, slash_width = request.widths
    vertical, num_vertical, slash, num_slash = rows.split((vertical_width, 1, slash_width, 1), dim=2)
    tables = (vertical, num_vertical[..., 0], slash, num_slash[..., 0])
    if len(rows) == len(request.spans):
        return VerticalSlashIndex(*tables, block_size=request.config.block_size)
    index = every_distance(request, request.widths)
    documents = torch.tensor([document.rows.start for document in request.estimated], device="cpu")  # of one row each
    documents = to_device(documents, index.device)
    for table, chosen in zip(index.tensors, tables, strict=True):
        table.index_copy_(0, documents, chosen)
    return index


def _estimated(request: AttentionRequest) -> tuple[EstimatedDocument, ...]:
    """Return the documents to estimate."""
    batch, cp_rank = request.query.shape[0], request.groups.cp.rank
    return estimated_documents(request.config, request.layout, cp_rank, batch, request.estimated_spans)


@lru_cache(maxsize=8)
def list_widths(config: MTrainingConfig, spans: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return the widths of ``vertical`` and ``slash`` that the budget allows in the longest document, at least 1.

    Packed verticals take this width for every document, so a pack of dense documents must not pay for the caps.
    """
    budget = BUDGETS.get(config.budget)
    sinks, local = budget.always_selected(config)
    vertical = slash = 1
    for start, stop in spans:
        is_dense = stop - start <= config.dense_below
        most_vertical, most_slash = budget.caps(config, stop - start)
        reach = blocks_touched(start, stop, config.block_size)
        becomes_dense = is_dense or budget.ranks_by_rate
        slash = max(slash, reach if becomes_dense else min(reach, max(1, local) + most_slash))
        vertical = max(vertical, 0 if is_dense else min(stop - start, sinks + most_vertical))
    return vertical, slash


@cache  # once for each reason, not once for each layer and step
def _log_reference(reason: str) -> None:
    if is_first_rank_of_host():
        _LOG.info("selection: reference. %s", reason)
