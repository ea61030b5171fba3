"""Definition of the attention as one dense mask in float64: slow, quadratic, sharing no code with any backend."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from ..types import AttentionIndex, AttentionOutput, BlockListIndex, VerticalSlashIndex


def allowed_mask(index: AttentionIndex, *, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return bool ``[batch, num_lists, seq_len, seq_len]`` on the CPU, True where a query sees a key.

    An index of block lists holds those of all blocks here, in their order: one rank's.
    """
    if isinstance(index, BlockListIndex):
        return _mask_of_lists(index, seq_len, cu_seqlens)
    return _mask_of_distances(index, seq_len, cu_seqlens)


def _mask_of_lists(index: BlockListIndex, seq_len: int, cu_seqlens: Tensor | None) -> Tensor:
    mask = torch.zeros(index.rows, index.num_lists, seq_len, seq_len, dtype=torch.bool)
    size, chunk_len = index.block_size, index.chunk_blocks * index.block_size
    for row, head, block in product(range(index.rows), range(index.num_lists), range(index.num_query_blocks)):
        first, stop = index.starts[row, head, block : block + 2].tolist()
        for entry in range(first, stop):
            chunk = int(index.chunks[entry])
            seen = -1 if index.row_masks is None else int(index.row_masks[entry])
            for query in range(block * size, min((block + 1) * size, seq_len)):
                if seen >> (query % size) & 1:
                    mask[row, head, query, chunk * chunk_len : (chunk + 1) * chunk_len] = True
    document = torch.zeros(seq_len)
    for bound in [] if cu_seqlens is None else cu_seqlens[1:-1].tolist():
        document[bound:] += 1
    return mask.tril() & (document[:, None] == document[None, :])


def _mask_of_distances(index: VerticalSlashIndex, seq_len: int, cu_seqlens: Tensor | None) -> Tensor:
    position = torch.arange(seq_len)
    causal = position[:, None] >= position[None, :]
    distance = position[:, None] // index.block_size - position[None, :] // index.block_size
    if cu_seqlens is None:
        owner = [torch.ones(seq_len, dtype=torch.bool) for _ in range(index.rows)]
    else:
        bounds = cu_seqlens.tolist()
        owner = [(position >= low) & (position < high) for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
    masks = torch.zeros(index.rows, index.num_lists, seq_len, seq_len, dtype=torch.bool)
    for row in range(index.rows):
        for number in range(index.num_lists):
            verticals = index.vertical[row, number, : index.num_vertical[row, number]].cpu().long()
            slashes = index.slash[row, number, : index.num_slash[row, number]].cpu().long()
            is_selected = torch.isin(position, verticals)[None, :] | torch.isin(distance, slashes)
            masks[row, number] = is_selected & causal & owner[row][:, None] & owner[row][None, :]
    return masks if cu_seqlens is None else masks.any(0, keepdim=True)


def oracle_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: AttentionIndex,
    *,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> AttentionOutput:
    """Compute masked softmax attention in float64, differentiable with respect to query, key and value.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``.
        key: ``[batch, seq, num_kv_heads, head_dim]``.
        value: as ``key``.
        index: of each head, or each group of heads.
        softmax_scale: default ``head_dim ** -0.5``.
        cu_seqlens: int32 ``[documents + 1]``, for packed documents.

    Returns:
        ``out`` and ``lse`` in float64; a row without keys has ``out`` 0 and ``lse`` -inf.
    """
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(group, dim=2) for tensor in (key, value))
    scale = 1.0 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale
    mask = allowed_mask(index, seq_len=query.shape[1], cu_seqlens=cu_seqlens).to(query.device)
    mask = mask.repeat_interleave(query.shape[2] // index.num_lists, dim=1)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    has_key = mask.any(-1)
    # A row without keys would make logsumexp differentiate -inf - -inf: give it one finite score and mask its results.
    scores = scores.masked_fill(~mask, float("-inf")).masked_fill(~has_key[..., None], 0.0)
    lse = torch.logsumexp(scores, -1)
    probability = torch.exp(scores - lse[..., None]) * has_key[..., None]
    out = torch.einsum("bhqk,bkhd->bqhd", probability, value)
    return AttentionOutput(out, lse.masked_fill(~has_key, float("-inf")))
