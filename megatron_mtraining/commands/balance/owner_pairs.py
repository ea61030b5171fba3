"""Pairs of an index by the owner of the query and the owner of the key: exact integers, no blocks x blocks.

``metrics.rank_pairs`` answers the smaller question of a training run and of the planner. A replay also needs the
owner of each vertical column, and owners that are not a layout's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import invalid
from ...layout import SequenceLayout
from ...metrics.density import counted_slashes, row_spans, tokens_per_block
from ...types import VerticalSlashIndex

OWNERS_AT_ONCE = 128
"""Owners whose queries are summed in one go: bounds a table of owners x columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Owners of each block's tokens and each vertical column. For ranks of a layout both are the block's rank."""

    of_blocks: Tensor
    """Owner of each block, int64 ``[num_blocks]``."""

    of_columns: Tensor
    """Owner of each column, int64 ``[seq_len]``."""

    num_block_owners: int
    num_column_owners: int

    @classmethod
    def of_whole_blocks(cls, owners: Tensor, count: int, *, seq_len: int, block_size: int) -> Owners:
        """Return owners, int64 ``[num_blocks]`` below ``count``, who have a block's columns with it."""
        columns = owners.repeat_interleave(block_size)[:seq_len]
        return cls(of_blocks=owners, of_columns=columns, num_block_owners=count, num_column_owners=count)


@dataclass(frozen=True, slots=True)
class OwnerPairs:
    """Pairs over all lists and rows; a pair that is both vertical and slash is a slash's."""

    slash: Tensor
    """Slash pairs, int64 ``[block owners, block owners]``, by the owner of the query's block and of the key's."""

    vertical: Tensor
    """Vertical pairs, int64 ``[block owners, column owners]``, by the owner of the query's block and of the column."""


def owner_pairs(
    index: VerticalSlashIndex, owners: Owners, *, seq_len: int, cu_seqlens: Tensor | None = None
) -> OwnerPairs:
    """Count on the host, one vector operation over blocks for each distinct distance of all lists together.

    Where heads share lists, ``index.per_head(num_heads)`` gives the pairs of all heads.

    Args:
        index: the global index, on any device.
        owners: who owns what.
        seq_len: tokens in the global sequence.
        cu_seqlens: int32 ``[documents + 1]``, for packed documents.
    """
    index = index.to("cpu")
    slash = torch.zeros(owners.num_block_owners, owners.num_block_owners, dtype=torch.int64)
    vertical = torch.zeros(owners.num_block_owners, owners.num_column_owners, dtype=torch.int64)
    distances = counted_slashes(index, seq_len=seq_len)
    for row, (start, stop) in enumerate(row_spans(index, seq_len=seq_len, cu_seqlens=cu_seqlens)):
        first_block, tokens = start // index.block_size, tokens_per_block(start, stop, block_size=index.block_size)
        owner_of_block = owners.of_blocks[first_block : first_block + len(tokens)]
        _add_slash_pairs(slash, distances[row], tokens, owner_of_block)
        columns = list(_columns_by_head(index, row, range(start, stop), owners))
        _add_queries_after(vertical, columns, tokens, owner_of_block)
        for head, column in enumerate(columns):
            chosen = index.slash[row, head, 1 : index.num_slash[row, head]].long()
            _subtract_covered(vertical, column, chosen, tokens, owner_of_block)
    return OwnerPairs(slash, vertical)


def owner_pairs_of_ranks(
    index: VerticalSlashIndex, layout: SequenceLayout, *, cu_seqlens: Tensor | None = None
) -> OwnerPairs:
    """Count pairs by the rank of the query and the rank of the key, which are the same under every schedule.

    Raises:
        ValueError: the layout's blocks are not the index's.
    """
    if layout.block_size != index.block_size:
        raise invalid("layout.block_size", f"the index's {index.block_size}", layout.block_size)
    owners = Owners.of_whole_blocks(
        layout.owners(), layout.cp_size, seq_len=layout.seq_len, block_size=layout.block_size
    )
    return owner_pairs(index, owners, seq_len=layout.seq_len, cu_seqlens=cu_seqlens)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Vertical columns of one head, those of one block and owner together."""

    block: Tensor
    """Block, int64 ``[count]``, counted from the row's first block."""

    owner: Tensor
    """Owner, int64 ``[count]``."""

    number: Tensor
    """Number of columns, int64 ``[count]``."""


def _columns_by_head(index: VerticalSlashIndex, row: int, span: range, owners: Owners) -> Iterator[_Columns]:
    """Yield the columns inside the span: one of another document keeps nothing, whichever list names it."""
    width, first_block = owners.num_column_owners, span.start // index.block_size
    for head in range(index.num_lists):
        position = index.vertical[row, head, : index.num_vertical[row, head]].long()
        position = position[(position >= span.start) & (position < span.stop)]
        block = position // index.block_size - first_block
        column, number = torch.unique(block * width + owners.of_columns[position], return_counts=True)
        yield _Columns(column // width, column % width, number)


def _add_slash_pairs(pairs: Tensor, slash: Tensor, tokens: Tensor, owner_of_block: Tensor) -> None:
    """Add one row's slash pairs.

    Args:
        pairs: int64 ``[owners, owners]``.
        slash: int64 ``[num_lists, max_s]``; distances of ``blocks`` and more have no pair.
        tokens: int64 ``[blocks]``.
        held: int64 ``[blocks]``, the owner of each block.
    """
    blocks = len(tokens)
    heads_with = torch.bincount(slash[slash < blocks], minlength=blocks)
    flat, query_offset = pairs.view(-1), owner_of_block * pairs.shape[1]
    for distance in heads_with.nonzero().flatten().tolist():
        query, key = slice(distance, blocks), slice(0, blocks - distance)
        area = tokens[query] * tokens[key] if distance else tokens * (tokens + 1) // 2
        flat.index_add_(0, query_offset[query] + owner_of_block[key], area * heads_with[distance])


def _add_queries_after(pairs: Tensor, columns: list[_Columns], tokens: Tensor, owner_of_block: Tensor) -> None:
    """Add every query in a later block than the column's, covered by a slash or not; distance 0 covers its own."""
    block, owner, number = (
        torch.cat([getattr(head, name) for head in columns]) for name in ("block", "owner", "number")
    )
    width = pairs.shape[1]
    columns_at, column = torch.unique(block * width + owner, return_inverse=True)
    number = torch.zeros_like(columns_at).index_add_(0, column, number)
    used, column = torch.unique(columns_at // width, return_inverse=True)
    # Queries of each owner between two used blocks, then from each used block to the end.
    passed = torch.searchsorted(used, torch.arange(len(tokens)))
    queries = pairs.new_zeros(pairs.shape[0], len(used) + 1)
    queries.index_put_((owner_of_block, passed), tokens, accumulate=True)
    for rows, added in zip(queries.split(OWNERS_AT_ONCE), pairs.split(OWNERS_AT_ONCE), strict=True):
        later = rows.sum(1, keepdim=True) - rows.cumsum(1)
        added.index_add_(1, columns_at % width, later[:, column] * number)


def _subtract_covered(pairs: Tensor, columns: _Columns, chosen: Tensor, tokens: Tensor, owner_of_block: Tensor) -> None:
    """Take away one head's queries in block rows where a slash covers the column.

    Args:
        pairs: int64 ``[block owners, column owners]``.
        columns: the head's.
        chosen: int64 ``[count]``: the head's distances but 0.
        tokens: int64 ``[blocks]``.
        held: int64 ``[blocks]``.
    """
    query = columns.block[:, None] + chosen
    is_in_row = query < len(tokens)
    query = query[is_in_row]
    owner, number = (each[:, None].expand_as(is_in_row)[is_in_row] for each in (columns.owner, columns.number))
    pairs.view(-1).index_add_(0, owner_of_block[query] * pairs.shape[1] + owner, -number * tokens[query])
