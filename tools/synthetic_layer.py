"""A layer of random query and key whose structure is known: sinks, locality, distances and columns are planted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHORTEST, NARROWEST = 130, 3
"""Tokens and head_dim of a synthetic layer: room for distances from 64 to half of them, and a pair that rotates."""

NUM_ROTATED_SHARE = 0.75
"""Share of head_dim that rotates with the position; the rest carries content."""


@dataclass(frozen=True, kw_only=True)
class SyntheticLayer:
    """Query and key of one layer."""

    query: Tensor
    """Query ``[batch, seq, num_heads, head_dim]``."""

    key: Tensor
    """Key ``[batch, seq, num_kv_heads, head_dim]``."""


def rotate(tensor: Tensor, position: Tensor) -> Tensor:
    """Rotate ``[..., seq, dims]`` to ``position`` ``[seq]`` by rotary embedding: pairs of halves at geometric rates."""
    half = tensor.shape[-1] // 2
    angle = position[:, None] * 10000.0 ** (-torch.arange(half, device=position.device) / half)
    first, second = tensor.split(half, dim=-1)
    return torch.cat((first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()), dim=-1)


def synthetic_layer(
    *, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int, generator: torch.Generator
) -> SyntheticLayer:
    """Make a layer whose structure is known: noise with four planted kinds of score. On the generator's device.

    Every query scores high the first four tokens (sinks) and near keys (locality), each head a few distances of its own
    (slashes), and each stretch of 512 queries the few keys of its topic (verticals, which change along the document).
    """
    rotated = int(head_dim * NUM_ROTATED_SHARE) // 2 * 2
    content = head_dim - rotated
    device = generator.device

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    position = torch.arange(seq_len, device=device)
    direction = randn(num_kv_heads, 1, rotated)
    direction *= 2.0 * head_dim**0.25 / direction.norm(dim=-1, keepdim=True)
    topics = randn(8, content)
    topics *= 2.5 * head_dim**0.25 / topics.norm(dim=-1, keepdim=True)
    sink = randn(content)
    sink *= 2.5 * head_dim**0.25 / sink.norm()

    key = randn(num_kv_heads, seq_len, head_dim)
    key[..., :rotated] += rotate(direction.expand(-1, seq_len, -1), position)
    topic_of_key = torch.randint(0, 8, (seq_len,), generator=generator, device=device)
    is_vertical = torch.rand(seq_len, generator=generator, device=device) < 0.01
    key[:, is_vertical, rotated:] += topics[topic_of_key[is_vertical]]
    key[:, :4, rotated:] += sink

    query = randn(num_heads, seq_len, head_dim)
    direction = direction.repeat_interleave(num_heads // num_kv_heads, dim=0).expand(-1, seq_len, -1)
    query[..., :rotated] += rotate(direction, position)
    for head in range(num_heads):
        for distance in torch.randint(64, seq_len // 2, (3,), generator=generator, device=device).tolist():
            query[head, :, :rotated] += rotate(direction[head], position - distance)
    topic_of_query = torch.randint(0, 8, (num_heads, -(-seq_len // 512)), generator=generator, device=device)
    query[..., rotated:] += topics[topic_of_query.repeat_interleave(512, dim=1)[:, :seq_len]] + sink
    return SyntheticLayer(query=query.transpose(0, 1)[None], key=key.transpose(0, 1)[None])
