"""Selection in plain PyTorch: any device, dtype, block size, estimator and budget; the definition of what is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import BUDGETS, MTrainingConfig
from ..errors import invalid
from ..request import SCRATCH_ELEMENTS
from ..tensors import accumulate_dtype, to_device
from ..transport import Transport
from .budget import (
    AttentionMass,
    Choice,
    Selection,
    always_pairs,
    bounded,
    causal_pairs,
    fold_sum,
    most_pairs,
    pairs_of_lists,
)
from .estimators import EstimatedDocument, SelectionRequest


def score(request: SelectionRequest) -> Callable[[], Tensor]:
    """Score every key, and return the function that ranks them.

    It returns int32 ``[documents, lists, entries]``: verticals and their count, slashes and their count, of every list.
    """
    documents, device = request.estimated, request.query.device
    numbers = [number for number, document in enumerate(documents) if _has_choice(document, request.config)]
    lists = None
    if len(numbers) < len(documents):
        lists = _always_selected(request)[:, None].repeat(1, request.all_lists, 1)
    if not numbers:
        return lambda: lists
    numbers_on_device = to_device(torch.tensor(numbers, device="cpu"), device)
    with torch.autocast(device.type, enabled=False):
        scored = _scored_documents(replace(request, estimated=_renumbered(documents[number] for number in numbers)))
    of_list = max(len(each.document.row_groups) * each.document.num_blocks for each in scored)
    waves, per_rank = request.waves(of_list * request.config.block_size)

    def rank() -> Tensor:
        with torch.autocast(device.type, enabled=False):
            if not _is_bounded(request.config):
                ranked = [torch.stack([each.lists(each.choose(wave, per_rank)) for wave in waves]) for each in scored]
            else:
                choices = [[each.choose(wave, per_rank) for wave in waves] for each in scored]
                most = _most_pairs(request, numbers_on_device, scored, choices)
                ranked = [
                    torch.stack([each.lists(each.bounded(*pair)) for pair in zip(of_document, of_waves, strict=True)])
                    for each, of_document, of_waves in zip(scored, choices, most, strict=True)
                ]
            ranked = request.gathered(torch.stack(ranked))
        return ranked if lists is None else lists.index_copy_(0, numbers_on_device, ranked)

    return rank


# ---- documents without a choice --------------------------------------------------------------------------------------


def _has_choice(document: EstimatedDocument, config: MTrainingConfig) -> bool:
    """True if a key of the document is neither a sink nor in a local block of every query: else no mass remains."""
    sinks, local = BUDGETS.get(config.budget).always_selected(config)
    return document.num_blocks > local and document.stop - document.start > sinks


def _renumbered(documents: Iterable[EstimatedDocument]) -> tuple[EstimatedDocument, ...]:
    """Return the documents with their probe rows counted among theirs alone."""
    renumbered, first = [], 0
    for document in documents:
        last = first + len(document.probe_rows)
        renumbered.append(replace(document, probes=slice(first, last)))
        first = last
    return tuple(renumbered)


def _always_selected(request: SelectionRequest) -> Tensor:
    """int32 ``[documents, entries]``: the list of each document that has nothing beside sinks and local blocks."""
    config, layout, counts = request.config, request.layout, []
    most_sinks, most_local = BUDGETS.get(config.budget).always_selected(config)
    for each in request.estimated:
        most = _dense_pairs(each, config)
        is_dense = most is not None and min(_always_pairs(each, config), causal_pairs(each)) > most
        sinks, local = min(each.stop - each.start, most_sinks), min(each.num_blocks, max(1, most_local))
        counts.append((each.start, *((0, each.num_blocks) if is_dense else (sinks, local))))
    start, sinks, local = to_device(torch.tensor(counts, device="cpu"), request.query.device).unbind(1)
    tables = []
    for first, count, width, padding in (
        (start, sinks, request.widths[0], layout.seq_len),
        (torch.zeros_like(start), local, request.widths[1], layout.num_blocks),
    ):
        entry = torch.arange(width, device=start.device)
        tables += [(first[:, None] + entry).where(entry < count[:, None], padding), count[:, None]]
    return torch.cat(tables, dim=1).int()


# ---- density ---------------------------------------------------------------------------------------------------------


def _is_bounded(config: MTrainingConfig) -> bool:
    """True if all lists of the layer share a bound on their density."""
    return config.max_density is not None and BUDGETS.get(config.budget).ranks_by_rate


def _always_pairs(document: EstimatedDocument, config: MTrainingConfig) -> int:
    return always_pairs(document, *BUDGETS.get(config.budget).always_selected(config), config.block_size)


def _dense_pairs(document: EstimatedDocument, config: MTrainingConfig) -> int | None:
    """Return the pairs above which a list of the document becomes dense; None where none does."""
    if not BUDGETS.get(config.budget).ranks_by_rate or config.max_density is not None:
        return None
    return math.floor(config.dense_above * causal_pairs(document))


def _most_pairs(
    request: SelectionRequest, numbers: Tensor, scored: list[ScoredDocument], choices: list[list[Choice]]
) -> Tensor:
    """int64 ``[scored documents, waves, lists per rank]``: the most pairs of this rank's lists by ``max_density``.

    A collective: the bound is a function of the pairs of all lists of all estimated documents, scored or not.
    """
    config, device, transport = request.config, request.query.device, request.shards.transport
    of_scored = torch.stack(
        [
            torch.stack([each.pairs(choice) for choice in of_document])
            for each, of_document in zip(scored, choices, strict=True)
        ]
    )
    causal = [causal_pairs(each) for each in request.estimated]
    always = [min(_always_pairs(each, config), most) for each, most in zip(request.estimated, causal, strict=True)]
    always, causal = (to_device(torch.tensor(each, device="cpu"), device)[:, None] for each in (always, causal))
    pairs = always.repeat(1, request.all_lists).index_copy_(0, numbers, request.gathered(of_scored))
    most = most_pairs(pairs, causal, config.max_density).index_select(0, numbers)
    _, waves, per_rank = of_scored.shape
    most = F.pad(most, (0, waves * transport.size * per_rank - request.all_lists))
    return most.unflatten(1, (waves, transport.size, per_rank))[:, :, transport.rank]


# ---- scores of the probe rows, in bounded scratch memory -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeScores:
    """``softmax_scale * query . key``, -inf where the key is after the row; computed chunk by chunk, never as a whole.

    A head of batch row ``b`` is number ``b * num_heads + h`` among those of all rows.
    """

    query: Tensor
    """``[batch, rows, num_heads, head_dim]`` float32 or float64: the same on every rank."""

    key: Tensor
    """``[batch, keys, num_kv_heads, head_dim]``: this rank's, any floating dtype."""

    row_positions: Tensor
    """int64 ``[rows]``."""

    key_positions: Tensor
    """int64 ``[keys]``, ascending."""

    num_unmasked: int
    """Number of leading keys that every row sees, so that their chunks need no mask."""

    softmax_scale: float

    @property
    def all_heads(self) -> int:
        """Query heads of all batch rows."""
        return self.query.shape[0] * self.query.shape[2]

    def chunks(self, heads: slice) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield ``(heads, keys, scores [heads, rows, keys])``; the heads of a chunk share one key head."""
        num_heads = self.query.shape[2]
        group = num_heads // self.key.shape[2]
        first = heads.start
        while first < heads.stop:
            stop = min(heads.stop, (first // group + 1) * group)
            batch_row, head = divmod(first, num_heads)
            query = self.query[batch_row, :, head : head + stop - first].transpose(0, 1).flatten(0, 1)
            for keys in self._key_chunks(query.shape[0]):
                key = self.key[batch_row, keys, head // group].to(query.dtype)
                yield slice(first, stop), keys, self._score(query, key, keys, stop - first)
            first = stop

    def _key_chunks(self, num_rows: int) -> Iterator[slice]:
        width = max(1, SCRATCH_ELEMENTS // num_rows)
        num_keys = self.key.shape[1]
        for first in range(0, num_keys, width):
            yield slice(first, min(first + width, num_keys))

    def _score(self, query: Tensor, key: Tensor, keys: slice, heads: int) -> Tensor:
        # alpha scales the float32 sum of products, so bfloat16 inputs meet the multiplier unrounded.
        scores = torch.addmm(query.new_zeros(1), query, key.T, beta=0, alpha=self.softmax_scale)
        scores = scores.view(heads, -1, key.shape[0])
        if keys.stop > self.num_unmasked:
            scores.masked_fill_(self.key_positions[keys] > self.row_positions[:, None], float("-inf"))
        return scores


def softmax_sums(
    scores: ProbeScores, *, selected: Callable[[slice, slice], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the parts of each row's softmax, over this rank's keys.

    Args:
        scores: of this rank's keys.
        selected: ``(heads, keys) -> bool [heads, rows, keys]``, to add up some of the keys apart.

    Returns:
        The maximum score ``[heads, rows]``, -inf in a row that sees no key, and ``[1, heads, rows]`` sums of
        ``exp(score - maximum)`` over all keys; with ``selected`` 2, the second over the selected ones.
    """
    shape = (scores.all_heads, scores.query.shape[1])
    maximum = scores.query.new_full(shape, float("-inf"))
    sums = scores.query.new_zeros(1 if selected is None else 2, *shape)
    for heads, keys, chunk in scores.chunks(slice(0, scores.all_heads)):
        new = torch.maximum(maximum[heads], chunk.amax(dim=-1))
        weight = chunk.sub_(_finite(new)[..., None]).exp_()
        sums[:, heads] *= torch.exp(maximum[heads] - _finite(new))
        sums[0, heads] += weight.sum(dim=-1)
        if selected is not None:
            sums[1, heads] += weight.masked_fill_(~selected(heads, keys), 0).sum(dim=-1)
        maximum[heads] = new
    return maximum, sums


def reduce_sums(maximum: Tensor, sums: Tensor, transport: Transport) -> tuple[Tensor, Tensor]:
    """Reduce :func:`softmax_sums` over the keys of all ranks. Every row must see a key on one of them."""
    overall = transport.all_reduce(maximum.clone(), op="max")
    return overall, transport.all_reduce(sums * torch.exp(maximum - overall))


def _finite(maximum: Tensor) -> Tensor:
    """Return ``maximum`` with 0 for -inf: subtracted from a score of -inf it leaves -inf, not NaN."""
    return maximum.masked_fill(maximum == float("-inf"), 0)


# ---- mass, and the choice by it --------------------------------------------------------------------------------------


def _scored_documents(request: SelectionRequest) -> list[ScoredDocument]:
    """Score each document for the softmax of its probe rows: one assembly and two reductions for all documents."""
    scores, transport = _probe_scores(request), request.shards.transport
    maxima, sums = zip(*(softmax_sums(each) for each in scores), strict=True)
    maximum, total = reduce_sums(torch.cat(maxima, dim=-1), torch.cat(sums, dim=-1), transport)
    return [
        ScoredDocument(
            request=request,
            document=document,
            scores=each,
            maximum=maximum[:, document.probes],
            weight=1.0 / (total[0, :, document.probes] * len(document.probe_rows)),
        )
        for each, document in zip(scores, request.estimated, strict=True)
    ]


def _probe_scores(request: SelectionRequest) -> list[ProbeScores]:
    """Return the scores of the probe rows of each document, assembled on all ranks, against this rank's keys in it."""
    all_rows = tuple(row for document in request.estimated for row in document.probe_rows)
    probes = request.shards.assemble_rows(request.query, all_rows).to(accumulate_dtype(request.query.dtype))
    row_positions = to_device(torch.tensor(all_rows, device="cpu"), request.query.device)
    key_positions = request.shards.positions(request.query.device)
    return [
        ProbeScores(
            query=probes[:, document.probes],
            key=request.key[:, document.local_tokens],
            row_positions=row_positions[document.probes],
            key_positions=key_positions[document.local_tokens],
            num_unmasked=document.num_unmasked,
            softmax_scale=request.softmax_scale,
        )
        for document in request.estimated
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredDocument:
    """One document whose softmax statistics are known: its second pass over scores, and what is chosen from that."""

    request: SelectionRequest
    document: EstimatedDocument

    scores: ProbeScores
    """Scores of this rank's keys in the document."""

    maximum: Tensor
    """``[all heads, rows]``: each row's maximum over the keys of all ranks."""

    weight: Tensor
    """``[all heads, rows]``: factor of ``exp(score - maximum)``."""

    def choose(self, wave: slice, lists_per_rank: int) -> Choice:
        """Choose columns and distances for this rank's lists of one wave."""
        config, length = self.request.config, self.document.stop - self.document.start
        budget = BUDGETS.get(config.budget)
        choice = budget.choose(self.mass_of(wave, lists_per_rank=lists_per_rank), config)
        for name, most in zip(choice._fields, budget.caps(config, length), strict=True):
            width = getattr(choice, name).items.shape[1]
            if width > most:
                raise invalid(f"choice.{name}.items", f"at most {most} wide, the cap of budget {config.budget}", width)
        return choice

    def pairs(self, choice: Choice) -> Tensor:
        """int64 ``[lists]``: pairs that the lists of a choice compute."""
        always = _always_pairs(self.document, self.request.config)
        return pairs_of_lists(choice, self.document, always, self.request.config.block_size)

    def bounded(self, choice: Choice, most: Tensor) -> Choice:
        """Return a choice without what exceeds ``most`` pairs ``[lists]``."""
        always = _always_pairs(self.document, self.request.config)
        return bounded(choice, most, self.document, always, self.request.config.block_size)

    def mass_of(self, lists: slice, *, lists_per_rank: int) -> AttentionMass:
        """Return mass on all keys for ``lists_per_rank`` lists: on rank r the r-th so many of ``lists``.

        Lists that are missing at the end have no mass.
        """
        document, shards, device = self.document, self.request.shards, self.maximum.device
        ranks, size = shards.layout.cp_size, shards.layout.block_size
        groups, slots = len(document.row_groups), document.slots_per_rank
        parts = self.scores.query.new_zeros(ranks * lists_per_rank, groups, slots * size)
        first = document.local_offset
        query_blocks = to_device(torch.tensor([block for block, _ in document.row_groups], device="cpu"), device)
        self._write(parts[: lists.stop - lists.start, :, first : first + self.scores.key.shape[1]], lists, query_blocks)
        received = shards.transport.all_to_all(parts.view(ranks, lists_per_rank, groups, slots * size))
        blocks = received.view(ranks, lists_per_rank, groups, slots, size).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return AttentionMass(
            mass=blocks.index_select(2, to_device(document.block_order, device)),
            query_blocks=query_blocks,
            visible=to_device(document.visible, device),
            document=document,
            num_heads=self.request.heads_per_list,
        )

    def _write(self, target: Tensor, lists: slice, query_blocks: Tensor) -> None:
        """Write this rank's mass to ``target`` ``[lists, row groups, keys]``, 0 for what is always selected."""
        group = self.request.heads_per_list
        for heads, keys, chunk in self.scores.chunks(slice(lists.start * group, lists.stop * group)):
            mass = chunk.sub_(self.maximum[heads, :, None]).exp_().mul_(self.weight[heads, :, None])
            of_chunk = slice(heads.start // group - lists.start, heads.stop // group - lists.start)
            for number, (_, rows) in enumerate(self.document.row_groups):
                of_heads = fold_sum(mass[:, rows], dim=1)
                target[of_chunk, number, keys] = fold_sum(of_heads.unflatten(0, (-1, group)), dim=1)
        sinks, local = BUDGETS.get(self.request.config.budget).always_selected(self.request.config)
        positions = self.scores.key_positions
        key_blocks = positions // self.request.config.block_size - self.document.first_block
        is_local = query_blocks[:, None] - key_blocks < local  # keys after their row too
        target.masked_fill_(is_local | (positions < self.document.start + sinks), 0)

    def lists(self, choice: Choice) -> Tensor:
        """int32 ``[lists, entries]``: the lists of a choice, with what is always selected; every distance if dense."""
        document, layout, config = self.document, self.request.layout, self.request.config
        device, widths = choice.vertical.items.device, self.request.widths
        most_sinks, most_local = BUDGETS.get(config.budget).always_selected(config)
        sinks = torch.arange(document.start, min(document.start + most_sinks, document.stop), device=device)
        local = torch.arange(min(max(1, most_local), document.num_blocks), device=device)
        first_column = document.first_block * layout.block_size
        vertical = _merge_ascending(
            sinks, choice.vertical, offset=first_column, width=widths[0], padding=layout.seq_len
        )
        slash = _merge_ascending(local, choice.slash, offset=0, width=widths[1], padding=layout.num_blocks)
        most = _dense_pairs(document, config)
        if most is not None:
            is_dense = (self.pairs(choice) > most)[:, None]
            no_vertical = F.pad(vertical.new_full((1, widths[0]), layout.seq_len), (0, 1))
            distance = torch.arange(widths[1], device=device, dtype=torch.int32)
            every_slash = distance.where(distance < document.num_blocks, layout.num_blocks)
            every_slash = F.pad(every_slash, (0, 1), value=document.num_blocks)
            vertical, slash = no_vertical.where(is_dense, vertical), every_slash.where(is_dense, slash)
        return torch.cat((vertical, slash), dim=1)


def _merge_ascending(always: Tensor, selection: Selection, *, offset: int, width: int, padding: int) -> Tensor:
    """Merge ``always`` and the chosen items, ascending, each entry once: kernels would count it twice.

    Args:
        always: int64, in every list.
        selection: ``[lists, ...]``; what it chooses of ``always``, or again, changes nothing.
        offset: added to the items.
        width: entries in a list; no list has more.
        padding: larger than any entry.

    Returns:
        int32 ``[lists, width + 1]``; the last entry is how many count.
    """
    count = selection.items.shape[0]
    chosen = (selection.items + offset).where(selection.chosen, padding)
    table = torch.cat((always.expand(count, -1), chosen), dim=1).sort(dim=1).values
    table[:, 1:].masked_fill_(table[:, 1:] == table[:, :-1], padding)
    entries = (table < padding).sum(dim=1, keepdim=True)
    table = F.pad(table.sort(dim=1).values, (0, width - table.shape[1]), value=padding)
    return torch.cat((table, entries), dim=1).int()
