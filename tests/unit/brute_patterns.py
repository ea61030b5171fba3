"""MoBA and XAttention as their papers define them, pair by pair in float64, sharing no code with the selections."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mtraining.config import MTrainingConfig


def documents(seq_len: int, bounds: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """First token and one past the last of the document of each token."""
    spans = [(0, seq_len)] if bounds is None else list(zip(bounds[:-1], bounds[1:], strict=True))
    return [span for span in spans for _ in range(*span)]


def moba_mask(query: Tensor, key: Tensor, config: MTrainingConfig, bounds: tuple[int, ...] | None = None) -> Tensor:
    """bool ``[batch, num_heads, seq, seq]``: what every query sees, causality and documents included."""
    batch, seq_len, num_heads, _ = query.shape
    group, chunk_len, document = num_heads // key.shape[2], config.moba_chunk, documents(seq_len, bounds)
    mask = torch.zeros(batch, num_heads, seq_len, seq_len, dtype=torch.bool)
    for row in range(batch):
        for head in range(num_heads):
            for token, (start, stop) in enumerate(document):
                own = token // chunk_len
                before = range(start // chunk_len, own)
                gates = []
                for chunk in before:
                    keys = key[row, max(start, chunk * chunk_len) : (chunk + 1) * chunk_len, head // group]
                    gates.append(float(query[row, token, head] @ keys.mean(0)))
                best = sorted(zip(gates, before, strict=True), key=lambda pair: (-pair[0], pair[1]))
                if stop - start > config.dense_below:
                    best = best[: config.moba_top_k - 1]
                for chunk in [own, *(chunk for _, chunk in best)]:
                    mask[row, head, token, max(start, chunk * chunk_len) : (chunk + 1) * chunk_len] = True
    return mask.tril()


def xattention_blocks(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    bounds: tuple[int, ...] | None = None,
    *,
    softmax_scale: float | None = None,
) -> Tensor:
    """bool ``[batch, num_heads, query blocks, key blocks]``."""
    batch, seq_len, num_heads, head_dim = query.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    size, stride, block_len = config.block_size, config.xattention_stride, config.xattention_block
    document, num_groups = documents(seq_len, bounds), -(-seq_len // stride)
    start_of = [document[min(token, seq_len - 1)][0] for token in range(num_groups * stride)]
    kept = torch.zeros(batch, num_heads, -(-seq_len // size), -(-seq_len // block_len), dtype=torch.bool)
    for row in range(batch):
        for head in range(num_heads):
            queries, keys = query[row, :, head].double(), key[row, :, head // (num_heads // key.shape[2])].double()
            scores = torch.full((num_groups, num_groups), -torch.inf, dtype=torch.float64)
            for i in range(num_groups):
                for j in range(i + 1):
                    if start_of[i * stride] != start_of[j * stride + stride - 1]:
                        continue
                    pairs = [(i * stride + stride - 1 - t, j * stride + t) for t in range(stride)]
                    scores[i, j] = sum(
                        float(queries[q] @ keys[k])
                        for q, k in pairs
                        if max(q, k) < seq_len and start_of[q] == start_of[k] == start_of[i * stride]
                    )
            weights = torch.softmax(scores * scale / stride, -1).nan_to_num(0.0)
            for block in range(kept.shape[2]):
                kept[row, head, block] = _kept(weights, block, start_of, document, config, kept.shape[3])
    return kept


def _kept(
    weights: Tensor,
    block: int,
    start_of: list[int],
    document: list[tuple[int, int]],
    config: MTrainingConfig,
    num_chunks: int,
) -> Tensor:
    """Key blocks of one query block."""
    size, stride, block_len = config.block_size, config.xattention_stride, config.xattention_block
    own, (start, stop) = block * size // block_len, document[block * size]
    if stop - start <= config.dense_below:
        return torch.tensor([start // block_len <= chunk <= own for chunk in range(num_chunks)])
    mass = [0.0] * num_chunks
    for i in range(block * size // stride, min((block + 1) * size // stride, len(weights))):
        for j in range(len(weights)):
            if start_of[i * stride] == start:
                mass[j * stride // block_len] += float(weights[i, j])
    chosen, reached = [own], mass[own]
    for chunk in sorted(range(num_chunks), key=lambda c: (-mass[c], c)):
        if chunk != own and reached < config.xattention_threshold * sum(mass) and mass[chunk] > 0:
            chosen.append(chunk)
            reached += mass[chunk]
    return torch.tensor([chunk in chosen for chunk in range(num_chunks)])
