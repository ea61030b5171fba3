"""Checks the inputs of an attention call before anything is computed, for one device and for a ring alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import invalid
from ..tensors import check_bshd, check_query_and_key, check_tensor, checked_scale
from ..types import AttentionIndex, BlockListIndex, Documents, VerticalSlashIndex


class AttentionCall(NamedTuple):
    """What the checks resolve on the way."""

    softmax_scale: float
    """The caller's, or ``head_dim ** -0.5``."""

    documents: Documents | None
    """The packed documents, or None."""


def check_kinds(query: Tensor, index: AttentionIndex) -> None:
    """Refuses a query that is no tensor and an index that is none, before anything is asked of them.

    Raises:
        ValueError: one of them is not.
    """
    check_tensor("query", query)
    if not isinstance(index, (VerticalSlashIndex, BlockListIndex)):
        got = None if index is None else type(index).__name__
        raise invalid("index", "a VerticalSlashIndex or a BlockListIndex", got, "select_index makes one.")


def check_attention_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: AttentionIndex,
    *,
    seq_len: int,
    softmax_scale: float | None,
    cu_seqlens: Tensor | None,
    query_blocks: Tensor | None = None,
) -> AttentionCall:
    """Refuses inputs that do not fit together, each with one sentence.

    The entries of an index are read only where that costs no synchronisation: on the CPU.

    Args:
        query: ``[batch, local seq, num_heads, head_dim]``.
        key: ``[batch, local seq, num_kv_heads, head_dim]``.
        value: as ``key``.
        index: the global index, or this rank's block lists.
        seq_len: tokens in the global sequence: ``query.shape[1]`` on one device, the layout's in a ring.
        softmax_scale: what scores are multiplied with, or None for the default.
        cu_seqlens: int32 ``[documents + 1]``, global, or None.
        query_blocks: int64 ``[query blocks]``, on the CPU: which global blocks ``query`` holds; None for 0, 1, 2, ...

    Raises:
        ValueError: an input is of a wrong shape, dtype, device or value.
    """
    check_query_and_key(query, key, packed=cu_seqlens is not None)
    check_bshd("value", value, query=query)
    if value.shape != key.shape:
        raise invalid("value.shape", f"{tuple(key.shape)} as key has", tuple(value.shape))
    documents = None if cu_seqlens is None else Documents.from_cu_seqlens(cu_seqlens, seq_len=seq_len)
    _check_index_shape(query, key, index, documents)
    if isinstance(index, BlockListIndex):
        _check_query_blocks(query, index, query_blocks)
    if index.device.type == "cpu":
        check_entries = _check_block_lists if isinstance(index, BlockListIndex) else _check_index_entries
        check_entries(index, seq_len)
    return AttentionCall(checked_scale(softmax_scale, query.shape[3]), documents)


def _check_index_shape(query: Tensor, key: Tensor, index: AttentionIndex, documents: Documents | None) -> None:
    by_batch = documents is None or isinstance(index, BlockListIndex)
    rows, what = (query.shape[0], "the batch size") if by_batch else (documents.count, "documents")
    if index.rows != rows:
        raise invalid("index.rows", f"{rows}, {what}", index.rows)
    heads = query.shape[2], key.shape[2]
    if index.num_lists not in heads:
        raise invalid("index.num_lists", f"{heads[0]} or {heads[1]}, the heads of query or of key", index.num_lists)
    if index.device != query.device:
        raise invalid("index.device", f"{query.device} as query has", index.device, "Use index.to().")


def _check_query_blocks(query: Tensor, index: BlockListIndex, query_blocks: Tensor | None) -> None:
    """Lists name no queries: nothing else tells those of another rank or layout from those of this call."""
    num_blocks = -(-query.shape[1] // index.block_size)
    if index.num_query_blocks != num_blocks:
        raise invalid("index.starts", f"of lists for {num_blocks} query blocks, those here", index.num_query_blocks)
    expected = torch.arange(num_blocks, device="cpu") if query_blocks is None else query_blocks
    if not torch.equal(index.query_blocks, expected):
        slot = int((index.query_blocks != expected).nonzero()[0])
        raise invalid(
            f"index.query_blocks[{slot}]",
            f"{int(expected[slot])}, the block of the queries there",
            int(index.query_blocks[slot]),
            "Select with the layout and the rank of this call.",
        )


def _check_index_entries(index: VerticalSlashIndex, seq_len: int) -> None:
    num_blocks = -(-seq_len // index.block_size)
    for name, entries, counts, limit in (
        ("vertical", index.vertical, index.num_vertical, seq_len),
        ("slash", index.slash, index.num_slash, num_blocks),
    ):
        width = entries.shape[-1]
        if not bool(((counts >= 0) & (counts <= width)).all()):
            raise invalid(f"index.num_{name}", f"from 0 to the width {width}", _range(counts))
        is_counted = torch.arange(width, device="cpu") < counts.unsqueeze(-1)
        if not bool(((entries >= 0) & (entries < limit) | ~is_counted).all()):
            raise invalid(f"index.{name}", f"in [0, {limit})", _range(entries[is_counted]))
        if not bool(((entries[..., 1:] > entries[..., :-1]) | ~is_counted[..., 1:]).all()):
            raise invalid(f"index.{name}", "strictly ascending in every list", "a list that is not")
    if not bool(((index.num_slash > 0) & (index.slash[..., :1].sum(-1) == 0)).all()):
        raise invalid("index.slash", "a list that starts with distance 0 for every head", "one that does not")


def _check_block_lists(index: BlockListIndex, seq_len: int) -> None:
    starts, chunks, num_entries = index.starts, index.chunks, index.chunks.numel()
    edges = torch.cat([starts.new_zeros(1), starts.flatten(0, 1)[:, -1]])
    if not (bool((starts.diff() >= 0).all()) and torch.equal(starts[..., 0].flatten(), edges[:-1])):
        raise invalid("index.starts", "ascending from list to list, from 0 on", "other numbers")
    if int(edges[-1]) != num_entries:
        raise invalid("index.chunks", f"of {int(edges[-1])} entries, as index.starts says", num_entries)
    limit = -(-seq_len // (index.block_size * index.chunk_blocks))
    if num_entries and not bool(((chunks >= 0) & (chunks < limit)).all()):
        raise invalid("index.chunks", f"in [0, {limit})", _range(chunks))
    begins_list = torch.zeros(num_entries + 1, dtype=torch.bool, device="cpu")
    begins_list[starts.flatten().long()] = True
    if not bool(((chunks[1:] > chunks[:-1]) | begins_list[1:-1]).all()):
        raise invalid("index.chunks", "strictly ascending in every list", "a list that is not")


def _range(numbers: Tensor) -> str:
    return f"{int(numbers.min())} to {int(numbers.max())}"
