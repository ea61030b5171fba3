"""Selection in plain PyTorch: any device, dtype, block size, estimator and budget; the definition of what is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import MTrainingConfig
from ..errors import invalid
from ..tensors import accumulate_dtype, to_device
from .budget import (
    Choice,
    always_pairs,
    bounded,
    causal_pairs,
    get_budget,
    most_pairs,
    pairs_of_lists,
)
from .lists import merge_ascending
from .mass_pass import MassPass
from .plan import EstimatedDocument
from .scores import ProbeScores, reduce_sums, softmax_sums
from .task import SelectionTask


def score(task: SelectionTask) -> Callable[[], Tensor]:
    """Score every key, and return the function that ranks them.

    It returns int32 ``[documents, lists, entries]``: verticals and their count, slashes and their count, of every list.
    """
    scored = [number for number, document in enumerate(task.planned) if _has_choice(document, task.config)]
    num_lists = task.query.shape[0] * task.lists_in_row
    lists = _always_selected(task)[:, None].repeat(1, num_lists, 1) if len(scored) < len(task.planned) else None
    if not scored:
        return lambda: lists
    part = task if lists is None else replace(task, planned=_renumbered(task.planned[number] for number in scored))
    with torch.autocast(task.query.device.type, enabled=False):
        passes = _mass_passes(part)
    columns = max(len(each.row_groups) * each.num_blocks for each in part.planned) * task.config.block_size
    waves, per_rank = part.waves(columns)

    def rank() -> Tensor:
        with torch.autocast(task.query.device.type, enabled=False):
            if _is_bounded(task.config):
                choices = [[_choice(each, wave, per_rank) for wave in waves] for each in passes]
                most = _most_pairs(task, scored, passes, choices)
                choices = _bounded(part, passes, choices, most)
                ranked = [
                    torch.stack([_lists(each, choice, task.widths) for choice in of_document])
                    for each, of_document in zip(passes, choices, strict=True)
                ]
            else:
                ranked = [
                    torch.stack([_lists(each, _choice(each, wave, per_rank), task.widths) for wave in waves])
                    for each in passes
                ]
            ranked = part.gathered(torch.stack(ranked))
        if lists is None:
            return ranked
        lists[scored] = ranked
        return lists

    return rank


def _has_choice(document: EstimatedDocument, config: MTrainingConfig) -> bool:
    """True if a key of the document is neither a sink nor in a local block of every query: else no mass is left."""
    sinks, local = get_budget(config.budget).always_selected(config)
    return document.num_blocks > local and document.stop - document.start > sinks


def _is_bounded(config: MTrainingConfig) -> bool:
    """True if all lists of the layer share a bound on their density."""
    return config.max_density is not None and get_budget(config.budget).ranks_by_rate


def _always_pairs(document: EstimatedDocument, config: MTrainingConfig) -> int:
    return always_pairs(document, *get_budget(config.budget).always_selected(config), config.block_size)


def _dense_pairs(document: EstimatedDocument, config: MTrainingConfig) -> int | None:
    """Return the pairs above which a list of the document becomes dense; None where none does."""
    if not get_budget(config.budget).ranks_by_rate or config.max_density is not None:
        return None
    return math.floor(config.dense_above * causal_pairs(document))


def _renumbered(documents: Iterable[EstimatedDocument]) -> tuple[EstimatedDocument, ...]:
    """Return the documents with their probe rows counted among theirs alone."""
    renumbered, first = [], 0
    for document in documents:
        last = first + len(document.probe_rows)
        renumbered.append(replace(document, probes=slice(first, last)))
        first = last
    return tuple(renumbered)


def _always_selected(task: SelectionTask) -> Tensor:
    """int32 ``[documents, entries]``: the list of each document that has nothing beside sinks and local blocks."""
    config, layout, counts = task.config, task.shards.layout, []
    most_sinks, most_local = get_budget(config.budget).always_selected(config)
    for each in task.planned:
        most = _dense_pairs(each, config)
        is_dense = most is not None and min(_always_pairs(each, config), causal_pairs(each)) > most
        sinks, local = min(each.stop - each.start, most_sinks), min(each.num_blocks, max(1, most_local))
        counts.append((each.start, *((0, each.num_blocks) if is_dense else (sinks, local))))
    start, sinks, local = to_device(torch.tensor(counts, device="cpu"), task.query.device).unbind(1)
    tables = []
    for first, count, width, padding in (
        (start, sinks, task.widths[0], layout.seq_len),
        (torch.zeros_like(start), local, task.widths[1], layout.num_blocks),
    ):
        entry = torch.arange(width, device=start.device)
        tables += [(first[:, None] + entry).where(entry < count[:, None], padding), count[:, None]]
    return torch.cat(tables, dim=1).int()


def _mass_passes(task: SelectionTask) -> list[MassPass]:
    """Score each document for the softmax of its probe rows: one assembly and two reductions for all documents."""
    scores, transport, device = _probe_scores(task), task.shards.transport, task.query.device
    maxima, sums = zip(*(softmax_sums(each) for each in scores), strict=True)
    maximum, total = reduce_sums(torch.cat(maxima, dim=-1), torch.cat(sums, dim=-1), transport)
    return [
        MassPass(
            scores=each,
            maximum=maximum[:, document.probes],
            weight=1.0 / (total[0, :, document.probes] * len(document.probe_rows)),
            query_blocks=to_device(torch.tensor([block for block, _ in document.row_groups], device="cpu"), device),
            visible=to_device(document.visible, device),
            block_order=to_device(document.block_order, device),
            document=document,
            config=task.config,
            shards=task.shards,
            always_selected=get_budget(task.config.budget).always_selected(task.config),
            heads_per_list=task.heads_per_list,
        )
        for each, document in zip(scores, task.planned, strict=True)
    ]


def _probe_scores(task: SelectionTask) -> list[ProbeScores]:
    """Score the probe rows of each document, assembled on all ranks, against this rank's keys in it."""
    all_rows = tuple(row for document in task.planned for row in document.probe_rows)
    probes = task.shards.assemble_rows(task.query, all_rows).to(accumulate_dtype(task.query.dtype))
    row_positions = to_device(torch.tensor(all_rows, device="cpu"), task.query.device)
    key_positions = task.shards.positions(task.query.device)
    return [
        ProbeScores(
            query=probes[:, document.probes],
            key=task.key[:, document.local_tokens],
            row_positions=row_positions[document.probes],
            key_positions=key_positions[document.local_tokens],
            num_unmasked=document.num_unmasked,
            softmax_scale=task.softmax_scale,
        )
        for document in task.planned
    ]


def _choice(mass_pass: MassPass, wave: slice, lists_per_rank: int) -> Choice:
    """Choose columns and distances for this rank's lists of one wave."""
    config, seq_len = mass_pass.config, mass_pass.shards.layout.seq_len
    budget = get_budget(config.budget)
    choice = budget.choose(mass_pass.mass_of(wave, lists_per_rank=lists_per_rank), config, seq_len)
    for name, most in zip(choice._fields, budget.caps(config, seq_len), strict=True):
        width = getattr(choice, name).items.shape[1]
        if width > most:
            raise invalid(f"choice.{name}.items", f"at most {most} wide, the cap of budget {config.budget}", width)
    return choice


def _most_pairs(task: SelectionTask, scored: list[int], passes: list[MassPass], choices: list[list[Choice]]) -> Tensor:
    """int64 ``[scored documents, all lists]``: the most pairs of each list under ``config.max_density``.

    A collective: the bound is a function of the pairs of all lists of all estimated documents, scored or not.
    """
    config, device = task.config, task.query.device
    of_scored = [
        torch.stack(
            [
                pairs_of_lists(choice, each.document, _always_pairs(each.document, config), config.block_size)
                for choice in of_document
            ]
        )
        for each, of_document in zip(passes, choices, strict=True)
    ]
    causal = [causal_pairs(each) for each in task.planned]
    always = [min(_always_pairs(each, config), most) for each, most in zip(task.planned, causal, strict=True)]
    always, causal = (to_device(torch.tensor(each, device="cpu"), device)[:, None] for each in (always, causal))
    pairs = always.repeat(1, task.query.shape[0] * task.lists_in_row)
    pairs[scored] = task.gathered(torch.stack(of_scored))
    return most_pairs(pairs, causal, config.max_density)[scored]


def _bounded(
    task: SelectionTask, passes: list[MassPass], choices: list[list[Choice]], most: Tensor
) -> list[list[Choice]]:
    """Return the choices without what exceeds ``most`` ``[documents, all lists]``."""
    ranks, rank = task.shards.transport.size, task.shards.transport.rank
    waves, per_rank = len(choices[0]), choices[0][0].vertical.items.shape[0]
    most = F.pad(most, (0, waves * ranks * per_rank - most.shape[1])).unflatten(1, (waves, ranks, per_rank))
    block_size = task.config.block_size
    return [
        [
            bounded(choice, of_wave, each.document, _always_pairs(each.document, task.config), block_size)
            for choice, of_wave in zip(of_document, most[number, :, rank], strict=True)
        ]
        for number, (each, of_document) in enumerate(zip(passes, choices, strict=True))
    ]


def _lists(mass_pass: MassPass, choice: Choice, widths: tuple[int, int]) -> Tensor:
    """int32 ``[lists_per_rank, entries]``: the lists of a choice, with what is always selected."""
    document, config, layout = mass_pass.document, mass_pass.config, mass_pass.shards.layout
    device = choice.vertical.items.device
    most_sinks, most_local = mass_pass.always_selected
    sinks = torch.arange(document.start, min(document.start + most_sinks, document.stop), device=device)
    local = torch.arange(min(max(1, most_local), document.num_blocks), device=device)
    first_column = document.first_block * layout.block_size
    vertical = merge_ascending(sinks, choice.vertical, offset=first_column, width=widths[0], padding=layout.seq_len)
    slash = merge_ascending(local, choice.slash, offset=0, width=widths[1], padding=layout.num_blocks)
    most = _dense_pairs(document, config)
    if most is not None:
        pairs = pairs_of_lists(choice, document, _always_pairs(document, config), config.block_size)
        is_dense = (pairs > most)[:, None]
        no_vertical = F.pad(vertical.new_full((1, widths[0]), layout.seq_len), (0, 1))
        distance = torch.arange(widths[1], device=device, dtype=torch.int32)
        every_slash = distance.where(distance < document.num_blocks, layout.num_blocks)
        every_slash = F.pad(every_slash, (0, 1), value=document.num_blocks)
        vertical, slash = no_vertical.where(is_dense, vertical), every_slash.where(is_dense, slash)
    return torch.cat((vertical, slash), dim=1)
