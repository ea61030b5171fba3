"""Exact mass of antidiagonals: the definition of XAttention's selection, on every device and for every dtype.

Keys travel round the ring twice and are scored tile by tile: for the greatest score of each group, then for the mass.
Nothing that is compared depends on who adds first: scores are sums of products of whole numbers that float64 holds
exactly, and mass is added up in integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import torch
from torch import Tensor

from ..layout.blocks import blocks_of
from ..request import SCRATCH_ELEMENTS, AttentionRequest
from ..tensors import to_device
from .antidiagonal_groups import Groups, grouped, groups_of_block, kept_of_mass, num_chunks, travelling
from .block_lists import exponent_of, fixed_point, operand_bits

_WEIGHT_BITS = 30
"""Bits of the weights ``exp(score - greatest)`` of one group on one key block, which are kept in int32."""

_MASS_BITS = 40
"""Bits of the mass of one group."""

_MASS_ELEMENTS = 2**26
"""Weights that are kept at one time, 256 MiB of int32; heads and query blocks take turns."""

_QUERY_ELEMENTS = 2**25
"""Elements of queries as whole numbers that are kept at one time, 256 MiB of float64."""


def kept_chunks(request: AttentionRequest, row: int, kv_head: int) -> Iterator[Tensor]:
    """Yield bool ``[query blocks, chunks]`` of the heads of one group of a batch row, head by head, block by block."""
    held = request.key[row, :, kv_head].contiguous()
    largest = request.shards.transport.all_reduce(held.abs().amax().double().view(1), op="max")
    for wave in _waves(request, kv_head):
        yield from _Wave(request, row, *wave, exponent_of(largest)).kept(held)


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

    def kept(self, key: Tensor) -> Iterator[Tensor]:
        """Yield bool ``[query blocks, chunks]``, head by head; ``key`` is this rank's, of the wave's group."""
        config = self.request.config
        shape, chunk_blocks = self.query.values.shape[:2], config.xattention_block // config.block_size
        greatest = self.query.values.new_full(shape, -torch.inf)
        for place, scores, _ in self._scores(key):
            torch.maximum(greatest[place], scores.amax(-1), out=greatest[place])
        weights = torch.zeros(*shape, num_chunks(self.request), dtype=torch.int32, device=key.device)
        unit = 2.0 ** (_WEIGHT_BITS - (chunk_blocks * self.per_block - 1).bit_length())
        for place, scores, blocks in self._scores(key):
            weight = scores.sub_(greatest[place].clamp(min=-1e300).unsqueeze(-1)).exp_().mul_(unit).round().int()
            of_block = weight.unflatten(-1, (-1, self.per_block)).sum(-1, dtype=torch.int32)
            weights[place].index_add_(-1, blocks // chunk_blocks, of_block)
        for head in weights:
            yield self._chosen(head)

    def _scores(self, key: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
        """Yield tiles of scores against all ranks' keys: their place among heads and groups, and the keys' blocks."""
        request, size = self.request, self.request.config.block_size
        step = max(1, SCRATCH_ELEMENTS // (8 * size * key.shape[-1]))
        for source, held in travelling(key, request.shards.transport):
            blocks = blocks_of(request.shards.layout, source)
            for first in range(0, len(blocks), step):
                part = blocks[first : first + step]
                on_device, tokens = to_device(part, key.device), held[first * size : (first + step) * size]
                groups = grouped(tokens.double(), on_device, request, speaker=-1)
                values = fixed_point(groups.values.flatten(-2), self.key_exponent, self.bits)
                keys = Groups(values, groups.number, groups.document)
                for place, scores in self._scores_of(keys, int(part[0]), int(part[-1])):
                    yield place, scores, on_device

    def _scores_of(
        self, keys: Groups, first_block: int, last_block: int
    ) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Yield the tiles against keys of ``first_block`` to ``last_block``: of queries from ``first_block`` on."""
        query, step = self.query, max(1, SCRATCH_ELEMENTS // (len(keys.number) * self.per_block))
        edges = torch.searchsorted(self.host_blocks, torch.tensor([first_block, last_block + 1], device="cpu")).tolist()
        for head, (begin, end) in product(range(len(query.values)), pairwise([*edges, len(self.host_blocks)])):
            for block in range(begin, end, step):
                groups = slice(block * self.per_block, min(block + step, end) * self.per_block)
                place = (slice(head, head + 1), groups)
                scores = (query.values[place] @ keys.values.T).mul_(self.unit[place])
                hidden = keys.document != query.document[groups].unsqueeze(-1) if self.request.documents else None
                if begin == edges[0]:  # queries among the keys: the others come after all of them
                    is_later = keys.number > query.number[groups].unsqueeze(-1)
                    hidden = is_later if hidden is None else hidden | is_later
                yield place, scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)

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
        return kept_of_mass(mass, self.blocks[blocks], groups, self.request)
