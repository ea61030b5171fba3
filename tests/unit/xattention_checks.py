"""What a selection of XAttention in float32 must satisfy, judged by masses in float64 that share no code with it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mtraining import BlockListIndex, MTrainingConfig

TOLERANCE = 1e-4
"""Of a share of the mass, or of the ratio of two masses: what the rounding of scores of some ten makes of them."""


def kept_table(index: BlockListIndex, num_chunks: int) -> Tensor:
    """bool ``[rows, lists, query blocks, chunks]`` of an index."""
    counts = index.starts.diff(dim=-1)
    table = torch.zeros(counts.numel(), num_chunks, dtype=torch.bool, device=counts.device)
    line = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts.flatten())
    table[line, index.chunks.long()] = True
    return table.view(*counts.shape, num_chunks)


def xattention_mass(
    query: Tensor, key: Tensor, config: MTrainingConfig, bounds: tuple[int, ...] | None = None
) -> Tensor:
    """float64 ``[num_heads, query blocks, key blocks]`` of one batch row ``[seq, heads, head_dim]``, lengths in blocks.

    ``seq`` is a multiple of both block sizes.
    """
    seq_len, num_heads, head_dim = query.shape
    stride, device = config.xattention_stride, query.device
    document = torch.zeros(seq_len, dtype=torch.int64, device=device)
    for bound in (bounds or ())[1:-1]:
        document[bound:] += 1
    of_token = document.view(-1, stride)
    is_first, is_last = (of_token == of_token[:, place, None] for place in (0, -1))
    of_query, of_key = of_token[:, 0], of_token[:, -1]
    number = torch.arange(len(of_token), device=device)
    is_hidden = (number > number[:, None]) | (of_key != of_query[:, None])
    same = of_query.view(-1, config.block_size // stride)
    counts = (same == same[:, :1]).flatten()
    masses = []
    for head in range(num_heads):
        queries = query[:, head].double().view(-1, stride, head_dim) * is_first[..., None]
        keys = key[:, head // (num_heads // key.shape[1])].double().view(-1, stride, head_dim) * is_last[..., None]
        scores = torch.einsum("isd,jsd->ij", queries.flip(1), keys) * head_dim**-0.5 / stride
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1).nan_to_num(0.0) * counts[:, None]
        by_query = weights.view(len(same), -1, len(number)).sum(1)
        masses.append(by_query.view(len(same), -1, config.xattention_block // stride).sum(-1))
    return torch.stack(masses)


def check_kept(kept: Tensor, mass: Tensor, config: MTrainingConfig) -> None:
    """Every list is its own chunk and the fewest others with the most mass that reach the threshold, up to rounding.

    Args:
        kept: bool ``[num_heads, query blocks, chunks]``.
        mass: float64 of that shape, exact.
        config: of the selection.
    """
    own = torch.arange(mass.shape[1], device=mass.device) * config.block_size // config.xattention_block
    is_own = torch.zeros_like(kept).scatter_(-1, own.view(1, -1, 1).expand(len(kept), -1, 1), True)
    assert kept[is_own].all()
    total, reached = mass.sum(-1), mass.masked_fill(~kept, 0).sum(-1)
    needed = config.xattention_threshold * total
    assert (reached >= needed - TOLERANCE * total).all()
    least = mass.masked_fill(~kept | is_own, torch.inf).amin(-1)
    greatest_left = mass.masked_fill(kept, 0).amax(-1)
    assert (least >= greatest_left * (1 - TOLERANCE)).all()
    keeps_others = least < torch.inf
    assert (reached - least < needed + TOLERANCE * total)[keeps_others].all()
    assert keeps_others.any() and (mass[~kept] > 0).any(), "a selection that leaves nothing out shows nothing"
