"""Selection of XAttention (arXiv 2503.16428): blocks of keys by the mass of their antidiagonals.

``stride`` neighbouring tokens form a group. The score of a group of queries and one of keys adds up the products along
the antidiagonal, the first query with the last key and so on; a softmax over the groups of keys, causal by groups, is
the estimated attention. Each query block selects its own key block and then, from the greatest on, others until their
share of the mass reaches the threshold.

The mass is computed in one of two forms, each the same for every number of ranks and every layout: exact sums in
float64, here, which are the definition on every device and for every dtype, and products on tensor cores
(``xattention_tiles``), which a GPU uses for bfloat16 and float16.

For exact sums keys rotate twice and are scored tile by tile: for the greatest score of each group, then for the mass.
Nothing that is compared depends on who adds first: scores are sums of products of whole numbers that float64 holds
exactly, and mass is added up in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product

import torch
from torch import Tensor

from ..layout import blocks_of
from ..request import SCRATCH_ELEMENTS, AttentionRequest
from ..tensors import to_device
from ..types import AttentionIndex, BlockListIndex
from . import xattention_tiles
from .block_lists import ListBuilder, exponent_of, fixed_point, operand_bits, rows_of
from .dense import every_key
from .xattention_groups import Groups, chunks_of_mass, grouped, groups_of_block, num_chunks, rotating_keys

_WEIGHT_BITS = 30
"""Bits of the weights ``exp(score - greatest)`` of one group on one key block, which are selected in int32."""

_MASS_BITS = 40
"""Bits of the mass of one group."""

_MASS_ELEMENTS = 2**26
"""Weights that are held at one time, 256 MiB of int32; heads and query blocks follow each other."""

_QUERY_ELEMENTS = 2**25
"""Elements of queries as whole numbers that are held at one time, 256 MiB of float64."""


def prepare(request: AttentionRequest) -> Callable[[], Callable[[], AttentionIndex]]:
    """Plan the choice of blocks of ``config.xattention_block`` keys for every query block and head.

    A query block is one block of the layout. Its choice is for the document of its first token; rows of later
    documents begin inside it, and see its own key block, which is always selected. A group of queries counts for the
    document of its first token, a group of keys for that of its last, and tokens of another document in it as zeros.
    Documents of up to ``config.dense_below`` tokens select all blocks. Padding counts as zeros, as tokens behind the
    end do, and a query block of padding alone selects its own key block.

    With bfloat16 or float16 on a GPU the mass comes from tensor cores, with sums in float32, unless ``config.backend``
    is ``reference``: what decides a chunk may then lie within that rounding.

    The index holds the lists of this rank's query blocks; where every document is short, it is that of all pairs.
    """
    if request.is_short:
        return lambda: lambda: every_key(request)
    return lambda: lambda: _choose(request)


def _choose(request: AttentionRequest) -> BlockListIndex:
    builder = ListBuilder()
    selected_chunks = xattention_tiles.selected_chunks if xattention_tiles.takes(request) else _exact_chunks
    with torch.autocast(request.query.device.type, enabled=False):
        for row, of_row in rows_of(request):
            for kv_head in range(request.key.shape[2]):
                for selected in selected_chunks(of_row, row, kv_head):
                    builder.add(selected)
    return builder.index(request, chunk_blocks=request.config.xattention_block // request.config.block_size)


def _exact_chunks(request: AttentionRequest, row: int, kv_head: int) -> Iterator[Tensor]:
    """Yield bool ``[query blocks, chunks]`` of the heads of one group of a batch row, head by head, block by block."""
    held = request.key[row, :, kv_head].contiguous()
    largest = request.shards.transport.all_reduce(held.abs().amax().double().view(1), op="max")
    for wave in _waves(request, kv_head):
        yield from _Wave(request, row, *wave, exponent_of(largest)).selected(held)


def _waves(request: AttentionRequest, kv_head: int) -> Iterator[tuple[range, slice]]:
    """Yield the heads of a group, and query blocks, whose weights fit at one time; the same for every rank."""
    layout, config = request.shards.layout, request.config
    group = request.query.shape[2] // request.key.shape[2]
    per_block = groups_of_block(request) * num_chunks(request)
    query_elements = config.block_size * request.query.shape[3]
    num_blocks = max(1, min(_MASS_ELEMENTS // per_block, _QUERY_ELEMENTS // query_elements))
    local_blocks = -(-layout.local_len // config.block_size)
    num_heads = max(1, num_blocks // local_blocks)
    for head in range(0, group, num_heads):
        heads = range(kv_head * group + head, kv_head * group + min(head + num_heads, group))
        for block in range(0, local_blocks, num_blocks):
            yield heads, slice(block, min(block + num_blocks, local_blocks))


class _Wave:
    """The query blocks of some heads of one group that are scored at one time."""

    def __init__(self, request: AttentionRequest, row: int, heads: range, blocks: slice, key_exponent: Tensor) -> None:
        layout, config, device = request.shards.layout, request.config, request.query.device
        self.request, self.key_exponent = request, key_exponent
        self.per_block = groups_of_block(request)
        self.host_blocks = blocks_of(layout, request.shards.transport.rank)[blocks]
        self.bits = operand_bits(config.xattention_stride * request.query.shape[3])
        self.blocks = to_device(self.host_blocks, device)
        tokens = request.query[row, blocks.start * config.block_size : blocks.stop * config.block_size]
        tokens = tokens[:, heads.start : heads.stop].transpose(0, 1)
        groups = grouped(tokens.double(), self.blocks, request, speaker=0)
        values = groups.values.flip(-2).flatten(-2)
        exponent = exponent_of(values.abs().amax(-1, keepdim=True))
        self.query = Groups(fixed_point(values, exponent, self.bits), groups.number, groups.document)
        scale = request.softmax_scale / config.xattention_stride
        self.unit = torch.ldexp(values.new_tensor(scale), (exponent + key_exponent - 2 * self.bits).double())

    def selected(self, key: Tensor) -> Iterator[Tensor]:
        """Yield bool ``[query blocks, chunks]``, head by head; ``key`` is this rank's, of the wave's group."""
        config = self.request.config
        shape, chunk_blocks = self.query.values.shape[:2], config.xattention_block // config.block_size
        greatest = self.query.values.new_full(shape, -torch.inf)
        for part_of_query, scores, _ in self._scores(key):
            torch.maximum(greatest[part_of_query], scores.amax(-1), out=greatest[part_of_query])
        weights = torch.zeros(*shape, num_chunks(self.request), dtype=torch.int32, device=key.device)
        unit = 2.0 ** (_WEIGHT_BITS - (chunk_blocks * self.per_block - 1).bit_length())
        for part_of_query, scores, blocks in self._scores(key):
            weight = (
                scores.sub_(greatest[part_of_query].clamp(min=-1e300).unsqueeze(-1)).exp_().mul_(unit).round().int()
            )
            of_block = weight.unflatten(-1, (-1, self.per_block)).sum(-1, dtype=torch.int32)
            weights[part_of_query].index_add_(-1, blocks // chunk_blocks, of_block)
        for head in weights:
            yield self._chosen(head)

    def _scores(self, key: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
        """Yield tiles of scores against all ranks' keys: their heads and groups, and the keys' blocks."""
        request, size = self.request, self.request.config.block_size
        step = max(1, SCRATCH_ELEMENTS // (8 * size * key.shape[-1]))
        for source, held in rotating_keys(key, request.shards.transport):
            blocks = blocks_of(request.shards.layout, source)
            for first in range(0, len(blocks), step):
                part = blocks[first : first + step]
                on_device, tokens = to_device(part, key.device), held[first * size : (first + step) * size]
                groups = grouped(tokens.double(), on_device, request, speaker=-1)
                values = fixed_point(groups.values.flatten(-2), self.key_exponent, self.bits)
                keys = Groups(values, groups.number, groups.document)
                for part_of_query, scores in self._scores_of(keys, int(part[0]), int(part[-1])):
                    yield part_of_query, scores, on_device

    def _scores_of(
        self, keys: Groups, first_block: int, last_block: int
    ) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Yield the tiles against keys of ``first_block`` to ``last_block``: of queries from ``first_block`` on."""
        query, step = self.query, max(1, SCRATCH_ELEMENTS // (len(keys.number) * self.per_block))
        edges = torch.searchsorted(self.host_blocks, torch.tensor([first_block, last_block + 1], device="cpu")).tolist()
        for head, (begin, end) in product(range(len(query.values)), pairwise([*edges, len(self.host_blocks)])):
            for block in range(begin, end, step):
                groups = slice(block * self.per_block, min(block + step, end) * self.per_block)
                part_of_query = (slice(head, head + 1), groups)
                scores = (query.values[part_of_query] @ keys.values.T).mul_(self.unit[part_of_query])
                hidden = keys.document != query.document[groups].unsqueeze(-1) if self.request.documents else None
                if begin == edges[0]:  # queries among the keys: the others come after all of them
                    is_later = keys.number > query.number[groups].unsqueeze(-1)
                    hidden = is_later if hidden is None else hidden | is_later
                yield part_of_query, scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)

    def _chosen(self, weights: Tensor) -> Tensor:
        """bool ``[query blocks, chunks]``, from int32 ``[query groups, chunks]``; a few blocks at a time."""
        step = max(1, SCRATCH_ELEMENTS // (self.per_block * weights.shape[1]))
        parts = (slice(first, first + step) for first in range(0, len(self.blocks), step))
        return torch.cat([self._chosen_part(weights, part) for part in parts])

    def _chosen_part(self, weights: Tensor, blocks: slice) -> Tensor:
        """bool ``[blocks, chunks]`` of some of the query blocks."""
        part, query = slice(blocks.start * self.per_block, blocks.stop * self.per_block), self.query
        weights, groups = weights[part], Groups(query.values, query.number[part], query.document[part])
        total = weights.sum(-1, keepdim=True).clamp(min=1)
        mass = (weights / total.double()).mul_(2.0**_MASS_BITS).round().long()
        return chunks_of_mass(mass, self.blocks[blocks], groups, self.request)
