"""Scores of probe rows against the keys of one rank, in bounded scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transport.base import Transport

SCRATCH_ELEMENTS = 2**23
"""Scores held at once: 32 MiB in float32, however long the sequence is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeScores:
    """``softmax_scale * query . key``, -inf where the key is after the row; computed chunk by chunk, never as a whole.

    A *lane* is one query head of one batch row; lane ``b * num_heads + h``.
    """

    query: Tensor
    """``[batch, rows, num_heads, head_dim]`` float32 or float64: the same on every rank."""

    key: Tensor
    """``[batch, keys, num_kv_heads, head_dim]``: this rank's, any floating dtype."""

    row_positions: Tensor
    """int64 ``[rows]``."""

    key_positions: Tensor
    """int64 ``[keys]``, ascending."""

    num_unmasked: int
    """Number of leading keys that every row sees, so that their chunks need no mask."""

    softmax_scale: float

    @property
    def num_lanes(self) -> int:
        """Query heads of all batch rows."""
        return self.query.shape[0] * self.query.shape[2]

    def chunks(self, lanes: slice) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield ``(lanes, keys, scores [lanes, rows, keys])``; the lanes of a chunk share one key head."""
        num_heads = self.query.shape[2]
        group = num_heads // self.key.shape[2]
        lane = lanes.start
        while lane < lanes.stop:
            stop = min(lanes.stop, (lane // group + 1) * group)
            batch_row, head = divmod(lane, num_heads)
            query = self.query[batch_row, :, head : head + stop - lane].transpose(0, 1).flatten(0, 1)
            for keys in self._key_chunks(query.shape[0]):
                key = self.key[batch_row, keys, head // group].to(query.dtype)
                yield slice(lane, stop), keys, self._score(query, key, keys, stop - lane)
            lane = stop

    def _key_chunks(self, num_rows: int) -> Iterator[slice]:
        width = max(1, SCRATCH_ELEMENTS // num_rows)
        num_keys = self.key.shape[1]
        for first in range(0, num_keys, width):
            yield slice(first, min(first + width, num_keys))

    def _score(self, query: Tensor, key: Tensor, keys: slice, lanes: int) -> Tensor:
        # alpha scales the float32 sum of products, so bfloat16 inputs meet the multiplier unrounded.
        scores = torch.addmm(query.new_zeros(1), query, key.T, beta=0, alpha=self.softmax_scale)
        scores = scores.view(lanes, -1, key.shape[0])
        if keys.stop > self.num_unmasked:
            scores.masked_fill_(self.key_positions[keys] > self.row_positions[:, None], float("-inf"))
        return scores


def softmax_sums(scores: ProbeScores, *, kept: Callable[[slice, slice], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return the parts of each row's softmax, over this rank's keys.

    Args:
        scores: of this rank's keys.
        kept: ``(lanes, keys) -> bool [lanes, rows, keys]``, to add up some of the keys apart.

    Returns:
        The maximum score ``[lanes, rows]``, -inf in a row that sees no key, and ``[1, lanes, rows]`` (with ``kept``: 2)
        sums of ``exp(score - maximum)``: over all keys, then over the kept ones.
    """
    shape = (scores.num_lanes, scores.query.shape[1])
    maximum = scores.query.new_full(shape, float("-inf"))
    sums = scores.query.new_zeros(1 if kept is None else 2, *shape)
    for lanes, keys, chunk in scores.chunks(slice(0, scores.num_lanes)):
        new = torch.maximum(maximum[lanes], chunk.amax(dim=-1))
        weight = chunk.sub_(_finite(new)[..., None]).exp_()
        sums[:, lanes] *= torch.exp(maximum[lanes] - _finite(new))
        sums[0, lanes] += weight.sum(dim=-1)
        if kept is not None:
            sums[1, lanes] += weight.masked_fill_(~kept(lanes, keys), 0).sum(dim=-1)
        maximum[lanes] = new
    return maximum, sums


def reduce_sums(maximum: Tensor, sums: Tensor, transport: Transport) -> tuple[Tensor, Tensor]:
    """Reduce :func:`softmax_sums` over the keys of all ranks. Every row must see a key on one of them."""
    overall = transport.all_reduce(maximum.clone(), op="max")
    return overall, transport.all_reduce(sums * torch.exp(maximum - overall))


def _finite(maximum: Tensor) -> Tensor:
    """Return ``maximum`` with 0 for -inf: subtracted from a score of -inf it leaves -inf, not NaN."""
    return maximum.masked_fill(maximum == float("-inf"), 0)
