"""Mass of antidiagonals by products on tensor cores: XAttention's selection on a GPU, in bfloat16 and float16.

A group is a row of ``stride * head_dim`` numbers, queries in reverse order, so a tile of scores is one matrix product
with sums in float32. What a query group takes from a key block is one number, the logarithm of its sum of exponentials.
These stand in a table in the order of the sequence, from which mass is made and added up in integers. So keys rotate
once and are multiplied once, and nothing depends on who came first.

Lists are the same for every number of ranks and every layout if the score of two groups is. All products of a call have
one shape, the last ones are filled up, so one kernel makes them all, and it adds up every score in the same order
wherever in a tile it stands. torch promises neither; tests/gpu/test_cuda_xattention.py holds both, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import blocks_of
from ..request import AttentionRequest
from ..tensors import to_device
from .xattention_groups import (
    Groups,
    chunks_of_mass,
    documents_of_tokens,
    grouped,
    groups_of_block,
    num_chunks,
    numbers_of,
    rotating_keys,
)

_TILE_GROUPS = 1024
"""Groups of queries, for each head, and of keys in one product."""

_TABLE_ELEMENTS = 2**26
"""Query groups of all heads times key blocks that are held at one time, 256 MiB of float32; a tile of one head may need
more."""

_WEIGHT_BITS = 30
"""Bits of the weights ``exp(score - greatest)`` of one group on one chunk."""

_MASS_BITS = 30
"""Bits of the mass of a query block, in int32."""

_LEAST_SCORE = -1e30
"""The greatest score of a group that sees no key."""


def takes(request: AttentionRequest) -> bool:
    """True if tensor cores score: half precision on a GPU, with a torch whose products can keep float32 sums."""
    query = request.query
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and request.config.backend != "reference" and torch.__version__ >= "2.8"


def selected_chunks(request: AttentionRequest, row: int, kv_head: int) -> Iterator[Tensor]:
    """Yield bool ``[query blocks, chunks]`` of the heads of one group of a batch row, head by head."""
    keys, group = _Keys(request, request.key[row, :, kv_head]), request.query.shape[2] // request.key.shape[2]
    of_tile = _TILE_GROUPS * num_chunks(request) * _chunk_blocks(request)
    num_heads = min(group, max(1, _TABLE_ELEMENTS // of_tile))
    num_blocks = max(1, _TABLE_ELEMENTS // (of_tile * num_heads)) * _tile_blocks(request)
    local_blocks = len(blocks_of(request.shards.layout, request.shards.transport.rank))
    for first in range(0, group, num_heads):
        heads = slice(kv_head * group + first, kv_head * group + min(first + num_heads, group))
        waves = [slice(block, min(block + num_blocks, local_blocks)) for block in range(0, local_blocks, num_blocks)]
        yield from torch.cat([_selected_by(request, row, heads, wave, keys) for wave in waves], dim=1)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some blocks of one rank, filled up with blocks behind the sequence."""

    blocks: Tensor
    """int64, ascending: blocks that exist."""

    host_blocks: Tensor
    """The same on the CPU."""

    values: Tensor
    """``[rows, stride * head_dim]``: a row for each group, of queries for each head and group."""

    number: Tensor
    """int64 ``[groups]``, global; in the order of ``values``."""

    document: Tensor
    """int64 ``[groups]``."""

    @property
    def first(self) -> int:
        """First block of the tile."""
        return int(self.host_blocks[0])

    @property
    def last(self) -> int:
        """Last block in the tile that exists."""
        return int(self.host_blocks[-1])


class _Keys:
    """One head's keys, of all ranks. In a tile a block's groups lie as far apart as the tile has blocks."""

    def __init__(self, request: AttentionRequest, key: Tensor) -> None:
        self._request = request
        blocks = _filled_up(blocks_of(request.shards.layout, request.shards.transport.rank), request)
        values = grouped(key, to_device(blocks, key.device), request, speaker=-1).values
        self._values = self._by_tile(values).flatten(-2)
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def tiles(self, last_block: int) -> Iterator[_Tile]:
        """Yield the tiles that begin up to a block; a collective, in which keys rotate."""
        step = _tile_blocks(self._request)
        for source, values in rotating_keys(self._values, self._request.shards.transport):
            host_blocks = blocks_of(self._request.shards.layout, source)
            blocks, number, document = self._table(source)
            for number_of_tile, first in enumerate(range(0, len(host_blocks), step)):
                if int(host_blocks[first]) > last_block:
                    break
                there = slice(first, min(first + step, len(host_blocks)))
                yield _Tile(
                    blocks[there],
                    host_blocks[there],
                    values[number_of_tile],
                    number[number_of_tile],
                    document[number_of_tile],
                )

    def _table(self, source: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rank's blocks, and by tile the numbers and documents of its groups."""
        if source not in self._tables:
            request = self._request
            blocks = to_device(_filled_up(blocks_of(request.shards.layout, source), request), request.key.device)
            number = numbers_of(blocks, request)
            document = documents_of_tokens(number, request)[:, -1]
            self._tables[source] = blocks, self._by_tile(number), self._by_tile(document)
        return self._tables[source]

    def _by_tile(self, of_groups: Tensor) -> Tensor:
        """Reshape ``[groups, ...]`` to ``[tiles, groups of a tile, ...]``."""
        shape = (-1, _tile_blocks(self._request), groups_of_block(self._request))
        return of_groups.unflatten(0, shape).transpose(1, 2).flatten(1, 2)


def _selected_by(request: AttentionRequest, row: int, heads: slice, wave: slice, keys: _Keys) -> Tensor:
    """Return the chunks that query blocks select, by their slots on this rank: bool ``[heads, blocks, chunks]``."""
    queries = list(_query_tiles(request, row, heads, wave))
    last_block, rows = queries[-1].last, _tile_rows(request)
    seen_chunks = last_block // _chunk_blocks(request) + 1
    shape = (heads.stop - heads.start, len(queries) * rows, seen_chunks * _chunk_blocks(request))
    table = torch.full(shape, -torch.inf, device=request.query.device)
    for tile in keys.tiles(last_block):
        seen = int(torch.searchsorted(tile.host_blocks, last_block, right=True))
        for number_of_tile, query in enumerate(queries):
            if tile.first <= query.last:
                scores = _block_scores(query, tile, request)[..., :seen]
                table[:, number_of_tile * rows : (number_of_tile + 1) * rows].index_copy_(
                    -1, tile.blocks[:seen], scores
                )
    blocks = torch.cat([query.blocks for query in queries])
    there = slice(len(blocks) * groups_of_block(request))
    number, document = (torch.cat([getattr(query, name) for query in queries]) for name in ("number", "document"))
    groups = Groups(table, number[there], document[there])
    selected = chunks_of_mass(_mass(table[:, there], request), blocks, groups, request)
    return pad(selected, (0, num_chunks(request) - seen_chunks))


def _query_tiles(request: AttentionRequest, row: int, heads: slice, wave: slice) -> Iterator[_Tile]:
    size, tokens = request.config.block_size, request.query[row, :, heads]
    host_blocks = blocks_of(request.shards.layout, request.shards.transport.rank)
    for first in range(wave.start, wave.stop, _tile_blocks(request)):
        part = host_blocks[first : min(first + _tile_blocks(request), wave.stop)]
        blocks = to_device(_filled_up(part, request), tokens.device)
        held = tokens[first * size : (first + len(part)) * size].transpose(0, 1)
        groups = grouped(held, blocks, request, speaker=0)
        values = groups.values.flip(-2).flatten(-2).flatten(0, 1)
        yield _Tile(blocks[: len(part)], part, values, groups.number, groups.document)


def _filled_up(host_blocks: Tensor, request: AttentionRequest) -> Tensor:
    """Fill up to whole tiles with blocks behind the end."""
    missing = -len(host_blocks) % _tile_blocks(request)
    return torch.cat([host_blocks, torch.arange(missing, device="cpu") + request.shards.layout.num_blocks])


def _block_scores(query: _Tile, keys: _Tile, request: AttentionRequest) -> Tensor:
    """float32 ``[heads, groups, key blocks]``: log of the sum of a block's exponentials, -inf where hidden."""
    scores = _products(query.values, keys.values).mul_(request.softmax_scale / request.config.xattention_stride)
    scores = scores.unflatten(0, (-1, len(query.number)))
    hidden = None
    if keys.last >= query.first:
        hidden = keys.number > query.number.unsqueeze(-1)
    if request.documents is not None:
        other = keys.document != query.document.unsqueeze(-1)
        hidden = other if hidden is None else hidden | other
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    return _log_sum(scores.unflatten(-1, (groups_of_block(request), -1)), dim=-2)


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """Scores before scaling, float32 ``[query rows, key rows]``."""
    if query.is_cuda:
        return torch.mm(query, keys.T, out_dtype=torch.float32)
    return query.float() @ keys.float().T


def _mass(table: Tensor, request: AttentionRequest) -> Tensor:
    """Compute the mass on chunks from the table's scores of blocks, int32 ``[heads, groups, chunks]``."""
    scores = _log_sum(table.unflatten(-1, (-1, _chunk_blocks(request))), dim=-1)
    greatest = scores.amax(-1, keepdim=True).clamp_(min=_LEAST_SCORE)
    weights = scores.sub_(greatest).exp_().mul_(2.0**_WEIGHT_BITS).round()
    total = weights.sum(-1, keepdim=True, dtype=torch.int64).clamp_(min=1)
    unit = 2.0 ** (_MASS_BITS - (groups_of_block(request) - 1).bit_length())
    return weights.mul_(unit / total.float()).round().int()


def _log_sum(scores: Tensor, *, dim: int) -> Tensor:
    """Compute ``logsumexp`` over a short dim, one after the other, in an order that no shape changes."""
    return functools.reduce(torch.logaddexp, scores.unbind(dim))


def _tile_blocks(request: AttentionRequest) -> int:
    return max(1, _TILE_GROUPS // groups_of_block(request))


def _tile_rows(request: AttentionRequest) -> int:
    return _tile_blocks(request) * groups_of_block(request)


def _chunk_blocks(request: AttentionRequest) -> int:
    return request.config.xattention_block // request.config.block_size
