"""A layer of random query and key whose structure is known: sinks, locality, distances and columns are planted.

    python -m tools.synthetic_layer outputs/planted1.pt --seq 16384

writes a file that ``mtraining recall --load`` and ``mtraining balance --load`` read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def main(argv: Sequence[str] | None = None) -> None:
    """Write a layer to a file."""
    parser = argparse.ArgumentParser(prog="python -m tools.synthetic_layer", description=__doc__)
    parser.add_argument("output", type=Path)
    for flag, default in (("seq", 16384), ("heads", 8), ("kv-heads", 2), ("head-dim", 64), ("seed", 0)):
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"({default})")
    options = parser.parse_args(argv)
    for flag, size, least in (("seq", options.seq, SHORTEST), ("head-dim", options.head_dim, NARROWEST)):
        if size < least:
            parser.error(f"--{flag} must be at least {least}, got {size}.")
    if options.kv_heads < 1 or options.heads < 1 or options.heads % options.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads {options.kv_heads}, got {options.heads}.")
    layer = synthetic_layer(
        seq_len=options.seq,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        generator=torch.Generator().manual_seed(options.seed),
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"query": layer.query, "key": layer.key}, options.output)


if __name__ == "__main__":
    main()
