"""Selects which keys each head keeps, on one device or over a context-parallel group.

The steps, each on all ranks and of a shape that the configuration fixes, once all ranks have agreed on the plan:

1. the probe rows of every document are assembled on all ranks;
2. each rank scores its own keys, and the softmax statistics are reduced;
3. the mass on each key is sent to the rank that ranks its head, as many heads to each;
4. that rank chooses, and the chosen lists are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import MTrainingConfig
from ..errors import invalid
from ..layout import SequenceLayout
from ..tensors import accumulate_dtype, check_query_and_key, checked_scale, to_device
from ..transport import Group, SoloTransport, as_transport
from ..transport.agreement import agree_on_plan, announcing_refusal
from ..types import Documents, VerticalSlashIndex
from .estimators import get_estimator
from .lists import dense_index, merge_ascending
from .mass_pass import MassPass
from .plan import EstimatedDocument, plan_documents
from .scores import SCRATCH_ELEMENTS, ProbeScores, reduce_sums, softmax_sums
from .shards import SequenceShards


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
) -> VerticalSlashIndex:
    """Chooses the vertical columns and slash distances of every query head from the attention of a few probe rows.

    Documents (batch rows, without ``cu_seqlens``) of up to ``config.dense_below`` tokens get every distance. On longer
    ones the estimator named by ``config.estimator`` decides; ``last_window`` is Algorithm 1 of the MTraining paper.
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

    Returns:
        The index over the global sequence, the same on every rank.

    Raises:
        ValueError: an argument does not fit; the sentence names it and the rule.
        RankMismatchError: ranks called with different arguments, or not all of them select.
    """
    group = None if cp_group is None else as_transport(cp_group)
    with announcing_refusal(group or SoloTransport(), query.device):
        check_query_and_key(query, key, packed=cu_seqlens is not None)
        softmax_scale = checked_scale(softmax_scale, query.shape[3])
        get_estimator(config.estimator)
        shards = SequenceShards.of(query, block_size=config.block_size, layout=layout, cp_group=group)
        seq_len, batch, num_heads = shards.layout.seq_len, query.shape[0], query.shape[2]
        documents = None if cu_seqlens is None else Documents.from_cu_seqlens(cu_seqlens, seq_len=seq_len)
        planned = plan_documents(config, shards.layout, shards.transport.rank, batch, documents)
    fields = _plan_fields(query, key, config, softmax_scale, shards.layout, documents)
    agree_on_plan(fields, shards.transport, device=query.device)

    spans = [(0, seq_len)] * batch if documents is None else documents.spans
    index = dense_index(spans, num_heads=num_heads, config=config, seq_len=seq_len, device=query.device)
    if planned:
        with torch.autocast(query.device.type, enabled=False):
            passes = _mass_passes(query, key, planned, config, shards, softmax_scale)
            widths = (index.vertical.shape[2], index.slash.shape[2])
            _write_rows(index, planned, _chosen_lists(passes, config, shards, widths))
    return index


def _plan_fields(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    softmax_scale: float,
    layout: SequenceLayout,
    documents: Documents | None,
) -> dict[str, object]:
    """The values behind :data:`megatron_mtraining.transport.agreement.PLAN_FIELDS`."""
    return {
        "operation": "select_vertical_slash",
        "query.shape": tuple(query.shape),
        "key.shape": tuple(key.shape),
        "query.dtype": query.dtype,
        "layout": layout,
        "softmax_scale": softmax_scale,
        "config": config,
        "cu_seqlens": None if documents is None else documents.bounds,
    }


def _mass_passes(
    query: Tensor,
    key: Tensor,
    planned: tuple[EstimatedDocument, ...],
    config: MTrainingConfig,
    shards: SequenceShards,
    softmax_scale: float,
) -> list[MassPass]:
    """Scores each document for the softmax of its probe rows: one assembly and two reductions for all documents."""
    scores = _probe_scores(query, key, planned, shards, softmax_scale)
    maxima, sums = zip(*(softmax_sums(each) for each in scores), strict=True)
    maximum, total = reduce_sums(torch.cat(maxima, dim=-1), torch.cat(sums, dim=-1), shards.transport)
    return [
        MassPass(
            scores=each,
            maximum=maximum[:, document.probes],
            weight=1.0 / (total[0, :, document.probes] * len(document.probe_rows)),
            query_blocks=to_device(torch.tensor([block for block, _ in document.row_groups]), query.device),
            block_order=to_device(document.block_order, query.device),
            document=document,
            config=config,
            shards=shards,
        )
        for each, document in zip(scores, planned, strict=True)
    ]


def _probe_scores(
    query: Tensor,
    key: Tensor,
    planned: tuple[EstimatedDocument, ...],
    shards: SequenceShards,
    softmax_scale: float,
) -> list[ProbeScores]:
    """The probe rows of each document, assembled on all ranks, against this rank's keys in it."""
    all_rows = tuple(row for document in planned for row in document.probe_rows)
    probes = shards.assemble_rows(query, all_rows).to(accumulate_dtype(query.dtype))
    row_positions = to_device(torch.tensor(all_rows), query.device)
    key_positions = shards.positions(query.device)
    return [
        ProbeScores(
            query=probes[:, document.probes],
            key=key[:, document.local_tokens],
            row_positions=row_positions[document.probes],
            key_positions=key_positions[document.local_tokens],
            num_unmasked=document.num_unmasked,
            softmax_scale=softmax_scale,
        )
        for document in planned
    ]


def _chosen_lists(
    passes: list[MassPass], config: MTrainingConfig, shards: SequenceShards, widths: tuple[int, int]
) -> Tensor:
    """int32 ``[documents, lanes, entries]``: verticals and their count, slashes and their count, of every lane.

    Lanes go in waves that bound the memory; in each, rank r ranks the r-th part.
    """
    num_lanes, ranks = passes[0].scores.num_lanes, shards.transport.size
    columns = max(len(each.document.row_groups) * each.document.num_blocks for each in passes) * config.block_size
    per_rank = max(1, min(-(-num_lanes // ranks), SCRATCH_ELEMENTS // columns))
    waves = [slice(first, min(first + ranks * per_rank, num_lanes)) for first in range(0, num_lanes, ranks * per_rank)]
    ranked = torch.stack([torch.stack([_lists(each, wave, per_rank, widths) for wave in waves]) for each in passes])
    gathered = shards.transport.all_gather(ranked)
    return gathered.permute(1, 2, 0, 3, 4).flatten(1, 3)[:, :num_lanes]


def _lists(mass_pass: MassPass, wave: slice, lanes_per_rank: int, widths: tuple[int, int]) -> Tensor:
    """int32 ``[lanes_per_rank, entries]``: what this rank's lanes of one wave keep."""
    document, config, layout = mass_pass.document, mass_pass.config, mass_pass.shards.layout
    choice = get_estimator(config.estimator).choose(mass_pass.mass_of(wave, lanes_per_rank=lanes_per_rank), config)
    for name, most in (("vertical", config.max_vertical), ("slash", config.max_slash)):
        width = getattr(choice, name).items.shape[1]
        if width > most:
            raise invalid(f"choice.{name}.items", f"at most max_{name} = {most} wide", width)
    device = choice.vertical.items.device
    sinks = torch.arange(document.start, min(document.start + config.sink_tokens, document.stop), device=device)
    local = torch.arange(min(config.local_blocks, document.num_blocks), device=device)
    first_column = document.first_block * layout.block_size
    vertical = merge_ascending(sinks, choice.vertical, offset=first_column, width=widths[0], padding=layout.seq_len)
    slash = merge_ascending(local, choice.slash, offset=0, width=widths[1], padding=layout.num_blocks)
    return torch.cat((vertical, slash), dim=1)


def _write_rows(index: VerticalSlashIndex, planned: tuple[EstimatedDocument, ...], lists: Tensor) -> None:
    """Overwrites the rows of ``index`` that belong to the planned documents, in place."""
    vertical_width, slash_width = index.vertical.shape[2], index.slash.shape[2]
    for document, table in zip(planned, lists, strict=True):
        rows = table.view(-1, index.num_heads, table.shape[-1])
        parts = rows.split((vertical_width, 1, slash_width, 1), dim=2)
        index.vertical[document.rows], index.slash[document.rows] = parts[0], parts[2]
        index.num_vertical[document.rows], index.num_slash[document.rows] = parts[1].squeeze(2), parts[3].squeeze(2)
