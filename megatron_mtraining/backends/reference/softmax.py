"""The arithmetic on a chunk of tile pairs: online softmax forward, recomputed probabilities backward.

A tensor is cut into tiles, one block of one head each, contiguous, so that any set of tiles is one ``index_select``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .pairs import TilePairs


class OnlineSoftmax:
    """Running ``(maximum, total, weighted sum of values)`` of each row of each query tile, fed in any order of keys."""

    def __init__(self, lse: Tensor, out: Tensor) -> None:
        """Continue from a normalised result; both tensors are overwritten.

        Args:
            lse: ``[tiles, block_size]``, -inf in rows without a key so far.
            out: ``[tiles, block_size, head_dim]``; not read in those rows.
        """
        empty = lse == -torch.inf
        self.maximum = lse
        self.total = torch.ones_like(lse).masked_fill_(empty, 0.0)
        self.weighted = out.masked_fill_(empty.unsqueeze(-1), 0.0)

    def add(self, pairs: TilePairs, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take in a chunk of pairs; ``query`` tiles are already scaled."""
        scores = _scores(pairs, query, key)
        # Pairs are sorted by query tile: a chunk touches one range of the running state.
        touched = slice(int(pairs.query_tile[0]), int(pairs.query_tile[-1]) + 1)
        local = pairs.query_tile - touched.start
        before = self.maximum[touched]
        maximum = before.scatter_reduce(0, local.unsqueeze(-1).expand(scores.shape[:2]), scores.amax(-1), "amax")
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)  # keeps -inf - -inf out of rows without a key
        probability = scores.sub_(shift[local].unsqueeze(-1)).exp_()
        fade = torch.exp(before - shift)
        self.total[touched] *= fade
        self.weighted[touched] *= fade.unsqueeze(-1)
        add_at(self.total[touched], local, probability.sum(-1))
        add_at(self.weighted[touched], local, torch.bmm(probability, value.index_select(0, pairs.key_tile)))
        self.maximum[touched] = maximum

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return ``out`` and ``lse`` tiles; 0 and -inf in rows without a key. The state is used up."""
        empty = self.total == 0.0
        out = self.weighted.div_(self.total.masked_fill(empty, 1.0).unsqueeze(-1))
        return out, self.maximum.add_(self.total.log_())


@dataclass(slots=True)
class SoftmaxGradient:
    """Everything that the backward of some query tiles reads, and the sums that it adds to, all in tiles.

    ``query`` is already scaled, so ``grad_key`` needs no scale and ``grad_query`` still does.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor

    def __post_init__(self) -> None:
        """Neutralise rows without a key, which take part in the products."""
        empty = self.lse == -torch.inf
        self.lse = self.lse.masked_fill(empty, torch.inf)
        self.delta = self.delta.masked_fill(empty, 0.0)
        self.grad_out = self.grad_out.masked_fill(empty.unsqueeze(-1), 0.0)

    def add(self, pairs: TilePairs) -> None:
        """Add the gradients of a chunk of pairs."""
        row, column = pairs.query_tile, pairs.key_tile
        probability = _scores(pairs, self.query, self.key).sub_(self.lse[row].unsqueeze(-1)).exp_()
        grad_out = self.grad_out.index_select(0, row)
        add_at(self.grad_value, column, torch.bmm(probability.mT, grad_out))
        grad_scores = torch.bmm(grad_out, self.value.index_select(0, column).mT)
        grad_scores.sub_(self.delta[row].unsqueeze(-1)).mul_(probability)
        add_at(self.grad_query, row, torch.bmm(grad_scores, self.key.index_select(0, column)))
        add_at(self.grad_key, column, torch.bmm(grad_scores.mT, self.query.index_select(0, row)))


def _scores(pairs: TilePairs, query: Tensor, key: Tensor) -> Tensor:
    """``[pairs, block_size, key tile length]``: scaled scores, -inf in elements that do not count."""
    scores = torch.bmm(query.index_select(0, pairs.query_tile), key.index_select(0, pairs.key_tile).mT)
    if pairs.columns is not None:
        scores.masked_fill_(~pairs.columns.unsqueeze(1), -torch.inf)
    if pairs.edges.numel():
        masked = scores.index_select(0, pairs.edges).masked_fill_(~pairs.edge_mask, -torch.inf)
        scores.index_copy_(0, pairs.edges, masked)
    return scores


def to_tiles(tensor: Tensor, tile_len: int, dtype: torch.dtype) -> Tensor:
    """Cut ``[..., seq, head_dim]`` into ``[... * tiles, tile_len, head_dim]``; zeros fill a short last tile."""
    short = -tensor.shape[-2] % tile_len
    tensor = tensor.to(dtype)
    tensor = pad(tensor, (0, 0, 0, short)) if short else tensor
    return tensor.reshape(-1, tile_len, tensor.shape[-1])


def from_tiles(tiles: Tensor, leading: tuple[int, ...], seq_len: int) -> Tensor:
    """Return the ``[*leading, seq_len, head_dim]`` that :func:`to_tiles` cut; a view."""
    return tiles.view(*leading, -1, tiles.shape[-1])[..., :seq_len, :]


def row_tiles(rows: Tensor, tile_len: int, dtype: torch.dtype) -> Tensor:
    """Cut ``[..., seq]``, one number for each row, into ``[... * tiles, tile_len]``."""
    return to_tiles(rows.unsqueeze(-1), tile_len, dtype).squeeze(-1)


def add_at(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Add ``source[i]`` to ``target[index[i]]``, in place, in one fixed order on every device."""
    if target.device.type == "cpu":
        target.index_add_(0, index, source)
    else:  # on CUDA index_add_ adds in any order, index_put_ sorts first
        target.index_put_((index,), source, accumulate=True)
