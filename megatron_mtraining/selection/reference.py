"""Selection in plain PyTorch: any device, dtype, block size and estimator; the definition of what is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import invalid
from ..tensors import accumulate_dtype, to_device
from .estimators import choose_by_budget, get_estimator
from .lists import merge_ascending
from .mass_pass import MassPass
from .plan import EstimatedDocument
from .scores import ProbeScores, reduce_sums, softmax_sums
from .task import SelectionTask


def score(task: SelectionTask) -> Callable[[], Tensor]:
    """Score every key, and return the function that ranks them.

    It returns int32 ``[documents, lists, entries]``: verticals and their count, slashes and their count, of every list.
    """
    judged = [place for place, document in enumerate(task.planned) if _has_choice(document, task)]
    if len(judged) < len(task.planned):
        return _with_kept_whole(task, judged)
    with torch.autocast(task.query.device.type, enabled=False):
        passes = _mass_passes(task)
    columns = max(len(each.row_groups) * each.num_blocks for each in task.planned) * task.config.block_size
    waves, per_rank = task.waves(columns)

    def rank() -> Tensor:
        with torch.autocast(task.query.device.type, enabled=False):
            ranked = [torch.stack([_lists(each, wave, per_rank, task.widths) for wave in waves]) for each in passes]
            return task.gathered(torch.stack(ranked))

    return rank


def _has_choice(document: EstimatedDocument, task: SelectionTask) -> bool:
    """True if a key of the document is neither a sink nor in a local block of every query: else no mass is left."""
    config = task.config
    if get_estimator(config.estimator).choose is not choose_by_budget:
        return True
    return document.num_blocks > config.local_blocks and document.stop - document.start > config.sink_tokens


def _with_kept_whole(task: SelectionTask, judged: list[int]) -> Callable[[], Tensor]:
    """Score as :func:`score` does where some documents have nothing to choose: only the ``judged`` are scored."""
    lists = _always_kept(task)[:, None].repeat(1, task.query.shape[0] * task.lists_in_row, 1)
    rank = score(replace(task, planned=_renumbered(task.planned[place] for place in judged))) if judged else None

    def rank_judged() -> Tensor:
        if rank is not None:
            lists[judged] = rank()
        return lists

    return rank_judged


def _renumbered(documents: Iterable[EstimatedDocument]) -> tuple[EstimatedDocument, ...]:
    """Return the documents with their probe rows counted among theirs alone."""
    renumbered, first = [], 0
    for document in documents:
        last = first + len(document.probe_rows)
        renumbered.append(replace(document, probes=slice(first, last)))
        first = last
    return tuple(renumbered)


def _always_kept(task: SelectionTask) -> Tensor:
    """int32 ``[documents, entries]``: of each document the list of its sinks and of its local distances alone."""
    config, layout = task.config, task.shards.layout
    bounds = torch.tensor([(each.start, each.stop, each.num_blocks) for each in task.planned], device="cpu")
    start, stop, num_blocks = to_device(bounds, task.query.device).unbind(1)
    sinks = (stop - start).clamp(max=config.sink_tokens)
    local = num_blocks.clamp(max=config.local_blocks)
    tables = []
    for first, count, width, padding in (
        (start, sinks, task.widths[0], layout.seq_len),
        (torch.zeros_like(start), local, task.widths[1], layout.num_blocks),
    ):
        place = torch.arange(width, device=start.device)
        tables += [(first[:, None] + place).where(place < count[:, None], padding), count[:, None]]
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
            block_order=to_device(document.block_order, device),
            document=document,
            config=task.config,
            shards=task.shards,
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


def _lists(mass_pass: MassPass, wave: slice, lists_per_rank: int, widths: tuple[int, int]) -> Tensor:
    """int32 ``[lists_per_rank, entries]``: this rank's of one wave."""
    document, config, layout = mass_pass.document, mass_pass.config, mass_pass.shards.layout
    choice = get_estimator(config.estimator).choose(mass_pass.mass_of(wave, lists_per_rank=lists_per_rank), config)
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
