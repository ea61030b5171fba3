"""The passes over block lists as torch operators, and the transpose of lists for the gradients of keys.

Legend as in backends/cuda/operators.py; ``E`` entries, ``N`` query slots.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...types import BlockListIndex
from . import _C
from .operators import launch
from .params import of_key_gradients, of_keys, of_lists, of_query
from .registration import operator


@operator(mutates_args=("out", "final_out", "lse"))
def list_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,  # int32 [B, L, N + 1]
    chunks: Tensor,  # int32 [E]
    row_masks: Tensor | None,  # int64 [E]
    query_tiles: Tensor,
    key_slots: Tensor,
    out: Tensor | None,
    final_out: Tensor | None,
    lse: Tensor,
    chunk_blocks: int,
    num_documents: int,  # 1 where documents are not packed
    softmax_scale: float,
    resume: bool,
    family: str,
) -> None:
    """Merge the pairs of the lists with ``out`` and ``lse`` as ``slash_forward`` does."""
    params = _C.AttentionParams(
        **of_query(query, query_tiles, softmax_scale),
        **of_keys(key, value, key_slots),
        **of_lists(chunk_blocks, num_documents, query_lists=(starts, chunks, row_masks)),
        out=out,
        final_out=final_out,
        lse=lse,
        resume=resume,
    )
    launch(family, _C.Operation.list_forward, params, query.device)


@operator(mutates_args=("grad_query", "final_grad_query", "grad_keys"))
def list_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    starts: Tensor,
    chunks: Tensor,
    row_masks: Tensor | None,
    key_starts: Tensor,  # int32 [B, L, chunks of keys + 1]
    key_blocks: Tensor,  # int32 [E]: query blocks of each key chunk
    key_row_masks: Tensor | None,
    query_tiles: Tensor,
    key_tiles: Tensor,
    query_slots: Tensor,
    key_slots: Tensor,
    grad_query: Tensor | None,
    final_grad_query: Tensor | None,
    grad_keys: Tensor | None,
    chunk_blocks: int,
    num_documents: int,
    softmax_scale: float,
    resume: bool,
    family: str,
) -> None:
    """Compute the gradients of the pairs of the lists, as ``slash_backward`` does for slash pairs."""
    query_lists, key_lists = (starts, chunks, row_masks), (key_starts, key_blocks, key_row_masks)
    params = _C.AttentionParams(
        **of_query(query, query_tiles, softmax_scale),
        **of_keys(key, value, key_slots),
        **of_lists(chunk_blocks, num_documents, query_lists=query_lists, key_lists=key_lists),
        **of_key_gradients(grad_keys, key_tiles, query_slots),
        grad_out=grad_out,
        lse=lse,
        delta=delta,
        grad_query=grad_query,
        final_grad_query=final_grad_query,
        resume=resume,
    )
    launch(family, _C.Operation.list_backward, params, query.device)


class KeyLists(NamedTuple):
    """Query blocks of each key chunk."""

    starts: Tensor
    """int32 ``[batch, num_lists, chunks of keys + 1]``."""

    blocks: Tensor
    """int32 ``[entries]``: global query blocks, ascending in each list."""

    row_masks: Tensor | None
    """int64 ``[entries]``: as in the index."""


def key_lists(index: BlockListIndex, query_tiles: Tensor, *, num_blocks: int) -> KeyLists:
    """Return the transpose of ``index``; made once for all steps of a backward. The host does not wait."""
    if index not in _key_lists:
        _key_lists[index] = _transposed(index, query_tiles, num_blocks)
    return _key_lists[index]


_key_lists: WeakKeyDictionary[BlockListIndex, KeyLists] = WeakKeyDictionary()
"""Transposes by index. A backward makes its own index from the saved tensors, so an entry ends with the backward."""


def _transposed(index: BlockListIndex, query_tiles: Tensor, num_blocks: int) -> KeyLists:
    device, num_slots, num_entries = index.device, index.num_query_blocks, index.chunks.numel()
    num_chunks = -(-num_blocks // index.chunk_blocks)
    block_of_slot = torch.zeros(num_slots, dtype=torch.int32, device=device)
    block_of_slot[query_tiles[:, 0].long()] = query_tiles[:, 1]
    counts = index.starts.diff(dim=-1).flatten()
    of_block = torch.arange(counts.numel(), device=device).repeat_interleave(counts, output_size=num_entries)
    number = torch.div(of_block, num_slots, rounding_mode="floor") * num_chunks + index.chunks
    number, order = number.sort(stable=True)
    starts = torch.searchsorted(number, torch.arange(index.rows * index.num_lists * num_chunks + 1, device=device))
    starts = starts.int().unfold(0, num_chunks + 1, num_chunks).contiguous()
    masks = None if index.row_masks is None else index.row_masks[order]
    return KeyLists(starts.view(index.rows, index.num_lists, -1), block_of_slot[of_block[order] % num_slots], masks)
