"""Recall of the dense attention by an index: the probability of its selected keys, at rows of the caller.

An :class:`AttentionCall` has the density of what one layer selected beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..config import MTrainingConfig
from ..errors import invalid
from ..layout import SequenceLayout
from ..request import SequenceShards, count_before
from ..selection import ESTIMATORS
from ..selection.reference import ProbeScores, reduce_sums, softmax_sums
from ..tensors import accumulate_dtype, to_device
from ..transport import Groups, as_ring_groups, as_transport
from ..types import AttentionIndex, BlockListIndex, VerticalSlashIndex
from ..validate import check_query_and_key, checked_scale, validate_layout
from .density import counted_slashes, counted_verticals, density, spans_of, triangle
from .list_pairs import computed_pairs_of_lists, entry_slots


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of one layer, without gradients."""

    layer: int
    """Number of the layer, from 1."""

    query: Tensor
    """``[batch, seq, num_heads, head_dim]``, after rotary embedding."""

    key: Tensor
    """``[batch, seq, num_kv_heads, head_dim]``, likewise."""

    index: AttentionIndex | None
    """Keys that were selected; None where the layer attended densely."""

    softmax_scale: float | None

    cu_seqlens: Tensor | None
    """int32 bounds of packed documents and padding, on the CPU."""

    @property
    def density(self) -> Tensor:
        """float64 ``[num_lists]``: computed pairs as a share of the causal ones; ones where the layer is dense."""
        seq_len = self.query.shape[1]
        if self.index is None:
            return torch.ones(1, dtype=torch.float64, device=self.query.device)
        if isinstance(self.index, VerticalSlashIndex):
            return density(self.index, seq_len=seq_len, cu_seqlens=self.cu_seqlens)
        layout = SequenceLayout("striped", seq_len=seq_len, cp_size=1, block_size=self.index.block_size)
        pairs = computed_pairs_of_lists(self.index, layout, cp_rank=0, cu_seqlens=self.cu_seqlens)
        spans = spans_of(len(pairs), seq_len=seq_len, cu_seqlens=self.cu_seqlens)
        return pairs.sum(0).double() / sum(triangle(stop - start) for start, stop in spans)

    def recall(self, rows: Sequence[int]) -> Tensor:
        """``[num_heads, rows]``: share of dense attention on the selected keys, at some rows, mean over the batch."""
        if self.index is None:
            return torch.ones(self.query.shape[2], len(rows), device=self.query.device)
        return attention_recall(
            self.query,
            self.key,
            self.index,
            rows=rows,
            softmax_scale=self.softmax_scale,
            cu_seqlens=self.cu_seqlens,
        ).mean(0)


@torch.no_grad()
def attention_recall(
    query: Tensor,
    key: Tensor,
    index: AttentionIndex,
    *,
    rows: Sequence[int],
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    groups: Groups | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the share of each row's dense causal attention that falls on keys of ``index``.

    A few rows cost little: they are scored against all keys once, in bounded memory, with three collectives.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``; this rank's tokens when ``layout`` is given.
        key: ``[batch, seq, num_kv_heads, head_dim]``, likewise.
        index: the global index, or this rank's block lists.
        rows: global positions to look at, ascending; see :func:`held_out_rows`.
        softmax_scale: the attention's own; default ``head_dim ** -0.5``.
        layout: as for :func:`megatron_mtraining.select`.
        groups: as for :func:`megatron_mtraining.select`.
        cu_seqlens: int32 ``[documents + 1]``, for packed documents.

    Returns:
        ``[batch, num_heads, len(rows)]`` in [0, 1], float32 (float64 for float64 input), the same on every rank.

    Raises:
        ValueError: an argument does not fit.
    """
    check_query_and_key(query, key, packed=cu_seqlens is not None)
    softmax_scale = checked_scale(softmax_scale, query.shape[3])
    transport = as_transport(as_ring_groups(groups).cp)
    shards = SequenceShards(validate_layout(query, layout, transport, block_size=index.block_size), transport)
    selected_keys = _selected_keys if index.is_global else _selected_keys_of_lists
    index = index.per_head(query.shape[2])
    spans = spans_of(query.shape[0], seq_len=shards.layout.seq_len, cu_seqlens=cu_seqlens)
    rows = _checked_rows(rows, shards.layout.seq_len)
    # Without documents every batch row has its own row of the index, and all are looked at together.
    parts_of_index = [slice(i, i + 1) for i in range(len(spans))] if cu_seqlens is not None else [slice(0, len(spans))]
    with torch.autocast(query.device.type, enabled=False):
        probes = shards.assemble_rows(query, rows).to(accumulate_dtype(query.dtype))
        parts = []
        for index_rows in parts_of_index:
            span = spans[index_rows.start]
            inside = slice(bisect_left(rows, span[0]), bisect_left(rows, span[1]))
            if inside.start < inside.stop:
                scores = _scores(probes[:, inside], rows[inside], key, span, shards, softmax_scale)
                selected = selected_keys(index, index_rows, scores, shards)
                parts.append(softmax_sums(scores, selected=selected))
        maxima, sums = (torch.cat(each, dim=-1) for each in zip(*parts, strict=True))
        _, sums = reduce_sums(maxima, sums, shards.transport)
    return (sums[1] / sums[0]).view(query.shape[0], query.shape[2], len(rows))


def held_out_rows(
    *configs: MTrainingConfig,
    seq_len: int,
    count: int,
    cu_seqlens: Tensor | None = None,
    num_valid: Tensor | None = None,
    first: int = 0,
) -> tuple[int, ...]:
    """Return up to ``count`` rows, evenly spread over those of the text that no estimator of ``configs`` probes.

    Args:
        *configs: their estimators' probe rows are left out, in every document that is long enough to be estimated.
        seq_len: tokens in the global sequence.
        count: how many rows are wanted; fewer come back where fewer are left.
        cu_seqlens: int32 ``[documents + 1]``, for packed documents.
        num_valid: int32 ``[documents]``, or ``[batch]``, as selection takes it: the rest is padding, which has no rows
            here. Of several batch rows the longest decides, so a row may be padding in another one.
        first: rows before this one are left out as well.
    """
    batch = 1 if num_valid is None else num_valid.numel()
    spans = spans_of(batch, seq_len=seq_len, cu_seqlens=cu_seqlens, num_valid=num_valid)
    is_free = torch.zeros(seq_len, dtype=torch.bool, device="cpu")
    for start, stop in spans:
        is_free[start:stop] = True
    for config, (start, stop) in product(configs, spans):
        if stop - start > config.dense_below:
            is_free[list(ESTIMATORS.get(config.estimator).probe_rows(start, stop, config))] = False
    is_free[:first] = False
    free = is_free.nonzero().flatten()
    count = min(count, len(free))
    # The middle of each of `count` equal pieces.
    return tuple(free[(2 * torch.arange(count, device="cpu") + 1) * len(free) // (2 * max(1, count))].tolist())


def _checked_rows(rows: Sequence[int], seq_len: int) -> tuple[int, ...]:
    rows = tuple(int(row) for row in rows)
    if not rows or list(rows) != sorted(set(rows)) or rows[0] < 0 or rows[-1] >= seq_len:
        raise invalid("rows", f"ascending positions below {seq_len}, at least one", rows)
    return rows


def _scores(
    probes: Tensor,
    rows: tuple[int, ...],
    key: Tensor,
    span: tuple[int, int],
    shards: SequenceShards,
    softmax_scale: float,
) -> ProbeScores:
    """Return scores of some rows against this rank's keys of the span that they lie in."""
    low, high, seen = count_before(shards.layout, shards.transport.rank, (*span, rows[0] + 1))
    return ProbeScores(
        query=probes,
        key=key[:, low:high],
        row_positions=to_device(torch.tensor(rows, device="cpu"), key.device),
        key_positions=shards.positions(key.device)[low:high],
        num_unmasked=max(0, min(seen, high) - low),
        softmax_scale=softmax_scale,
    )


def _selected_keys(
    index: VerticalSlashIndex, index_rows: slice, scores: ProbeScores, shards: SequenceShards
) -> Callable[[slice, slice], Tensor]:
    """Return ``(heads, keys) -> bool [heads, rows, keys]``: True for selected keys; keys after their row are either."""
    layout = shards.layout
    vertical = counted_verticals(index, seq_len=layout.seq_len)[index_rows].flatten(0, 1)
    slash = counted_slashes(index, seq_len=layout.seq_len)[index_rows].flatten(0, 1)
    row_blocks = scores.row_positions // index.block_size
    # One entry for each distance; what pads the lists marks the spare one at the end.
    is_selected_distance = torch.zeros(len(slash), layout.num_blocks + 1, dtype=torch.bool, device=slash.device)
    is_selected_distance.scatter_(1, slash, True)

    def selected(heads: slice, keys: slice) -> Tensor:
        position = scores.key_positions[keys]
        columns = vertical[heads].contiguous()
        entry = torch.searchsorted(columns, position.expand(len(columns), -1).contiguous())
        is_vertical = columns.gather(1, entry.clamp(max=columns.shape[1] - 1)) == position
        distance = (row_blocks[:, None] - position // index.block_size).clamp(min=0)
        return is_selected_distance[heads][:, distance] | is_vertical[:, None]

    return selected


def _selected_keys_of_lists(
    index: BlockListIndex, index_rows: slice, scores: ProbeScores, shards: SequenceShards
) -> Callable[[slice, slice], Tensor]:
    """Do the same for block lists, of which each rank has those of its own rows; a collective over the group."""
    layout, device = shards.layout, index.device
    size, chunk_len = index.block_size, index.block_size * index.chunk_blocks
    row = scores.row_positions
    is_here = to_device(layout.owners(), device)[row // size] == shards.transport.rank
    slot = to_device(layout.slots(), device)[row // size]
    of_list, of_slot = entry_slots(index)
    num_chunks = -(-layout.seq_len // chunk_len)
    table = torch.zeros(len(row), index.rows * index.num_lists * num_chunks, dtype=torch.int32, device=device)
    for number in range(len(row)):  # of all ranks' rows: to skip some, the host would wait for the device
        sees = (of_slot == slot[number]) & is_here[number]
        if index.row_masks is not None:
            sees &= index.row_masks >> (row[number] % size) & 1 == 1
        table[number].index_add_(0, of_list * num_chunks + index.chunks, sees.int())
    table = table.view(len(row), -1, num_chunks).transpose(0, 1).contiguous()
    table = shards.transport.all_reduce(table).bool()
    return lambda heads, keys: table[heads][:, :, scores.key_positions[keys] // chunk_len]
