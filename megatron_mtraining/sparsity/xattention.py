"""Selection of XAttention (arXiv 2503.16428): blocks of keys by the mass of their antidiagonals.

``stride`` neighbouring tokens form a group. The score of a group of queries and one of keys adds up the products along
the antidiagonal, the first query with the last key and so on; a softmax over the groups of keys, causal by groups, is
the estimated attention. Each query block keeps its own key block and then, from the greatest on, those that it takes
until their share of the mass reaches the threshold.

Keys travel round the ring twice and are scored tile by tile: for the greatest score of each group, then for the mass.
Nothing that is compared depends on who adds first: scores are sums of products of whole numbers that float64 holds
exactly, and mass is added up in integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import MTrainingConfig
from ..layout import SequenceLayout
from ..tensors import to_device
from ..transport import Group, Transport
from ..types import AttentionIndex
from .block_lists import (
    ListBuilder,
    are_short,
    documents_of,
    exponent_of,
    first_tokens,
    fixed_point,
    operand_bits,
)
from .opening import SelectionCall, open_selection
from .scores import SCRATCH_ELEMENTS

_WEIGHT_BITS = 30
"""Of the weights ``exp(score - greatest)`` of one group on one key block, which are kept in int32."""

_MASS_BITS = 40
"""Of the mass of one group."""

_MASS_ELEMENTS = 2**26
"""Weights that are kept at one time, 256 MiB of int32; heads and query blocks take turns."""

_QUERY_ELEMENTS = 2**25
"""Of queries as whole numbers that are kept at one time, 256 MiB of float64."""


@torch.no_grad()
def select_xattention(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    cp_group: Group | None = None,
    cu_seqlens: Tensor | None = None,
) -> AttentionIndex:
    """Chooses blocks of ``config.xattention_block`` keys for every query block and head.

    A query block is one block of the layout. It speaks for the document of its first token; rows of later documents
    begin inside it, and see its own key block, which is always kept. A group of queries counts for the document of
    its first token, a group of keys for that of its last, and tokens of another document in it as zeros. Documents of
    up to ``config.dense_below`` tokens keep all blocks.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``; this rank's tokens when ``layout`` is given.
        key: ``[batch, seq, num_kv_heads, head_dim]``, likewise.
        config: block, stride, threshold and block size.
        softmax_scale: the attention's own; default ``head_dim ** -0.5``.
        layout: which rank holds which tokens; given together with ``cp_group``.
        cp_group: the context-parallel process group, or any :class:`~megatron_mtraining.transport.base.Transport`.
        cu_seqlens: int32 ``[documents + 1]`` over the global sequence, for packed documents; ``batch`` is then 1.

    Returns:
        The lists of this rank's query blocks; or where every document is short, the index of all pairs.

    Raises:
        ValueError: an argument does not fit; the sentence names it and the rule.
        RankMismatchError: ranks called with different arguments, or not all of them select.
    """
    call, _ = open_selection(
        "select_xattention",
        query,
        key,
        config,
        softmax_scale=softmax_scale,
        layout=layout,
        cp_group=cp_group,
        cu_seqlens=cu_seqlens,
        plan=lambda _: None,
    )
    if call.attends_densely:
        return call.dense_index()
    builder = ListBuilder()
    for row in range(query.shape[0]):
        for kv_head in range(key.shape[2]):
            held = key[row, :, kv_head].contiguous()
            largest = call.shards.transport.all_reduce(held.abs().amax().double().view(1), op="max")
            for wave in _waves(call, kv_head):
                for kept in _Wave(call, row, *wave, exponent_of(largest)).kept(held):
                    builder.add(kept)
    return builder.index(call, chunk_blocks=config.xattention_block // config.block_size)


def _waves(call: SelectionCall, kv_head: int) -> Iterator[tuple[range, slice]]:
    """The heads of a group, and query blocks, whose weights fit at one time; the same for every rank."""
    layout, config = call.shards.layout, call.config
    group = call.query.shape[2] // call.key.shape[2]
    per_block = config.block_size // config.xattention_stride * _num_chunks(call)
    query_elements = config.block_size * call.query.shape[3]
    num_blocks = max(1, min(_MASS_ELEMENTS // per_block, _QUERY_ELEMENTS // query_elements))
    local_blocks = -(-layout.local_len // config.block_size)
    num_heads = max(1, num_blocks // local_blocks)
    for head in range(0, group, num_heads):
        heads = range(kv_head * group + head, kv_head * group + min(head + num_heads, group))
        for block in range(0, local_blocks, num_blocks):
            yield heads, slice(block, min(block + num_blocks, local_blocks))


def _num_chunks(call: SelectionCall) -> int:
    return -(-call.shards.layout.seq_len // call.config.xattention_block)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups of tokens as whole numbers."""

    values: Tensor
    """float64 ``[..., groups, stride * head_dim]``."""

    number: Tensor
    """int64 ``[groups]``, global."""

    document: Tensor
    """int64 ``[groups]``."""


def _grouped(tokens: Tensor, blocks: Tensor, call: SelectionCall, *, speaker: int) -> _Groups:
    """Cuts ``[..., tokens, head_dim]`` of some blocks into groups; ``speaker`` is the place of whose document counts.

    Their values are ``[..., groups, stride, head_dim]`` here.
    """
    size, stride = call.config.block_size, call.config.xattention_stride
    tokens = pad(tokens.double(), (0, 0, 0, -tokens.shape[-2] % size)).unflatten(-2, (-1, stride))
    number = (blocks.unsqueeze(-1) * (size // stride) + torch.arange(size // stride, device=blocks.device)).flatten()
    document = documents_of(number.unsqueeze(-1) * stride + torch.arange(stride, device=blocks.device), call)
    spoken_for = document[:, speaker]
    tokens = tokens.masked_fill((document != spoken_for.unsqueeze(-1)).unsqueeze(-1), 0.0)
    return _Groups(tokens, number, spoken_for)


class _Wave:
    """The query blocks of some heads of one group that are scored at one time."""

    def __init__(self, call: SelectionCall, row: int, heads: range, blocks: slice, key_exponent: Tensor) -> None:
        layout, config, device = call.shards.layout, call.config, call.query.device
        self.call, self.key_exponent = call, key_exponent
        self.per_block = config.block_size // config.xattention_stride
        self.host_blocks = layout.blocks(call.shards.transport.rank)[blocks]
        self.bits = operand_bits(config.xattention_stride * call.query.shape[3])
        self.blocks = to_device(self.host_blocks, device)
        tokens = call.query[row, blocks.start * config.block_size : blocks.stop * config.block_size]
        tokens = tokens[:, heads.start : heads.stop].transpose(0, 1)
        groups = _grouped(tokens, self.blocks, call, speaker=0)
        values = groups.values.flip(-2).flatten(-2)
        exponent = exponent_of(values.abs().amax(-1, keepdim=True))
        self.query = _Groups(fixed_point(values, exponent, self.bits), groups.number, groups.document)
        scale = call.softmax_scale / config.xattention_stride
        self.unit = torch.ldexp(values.new_tensor(scale), (exponent + key_exponent - 2 * self.bits).double())

    def kept(self, key: Tensor) -> Iterator[Tensor]:
        """bool ``[query blocks, chunks]`` of one head after the other; ``key`` is this rank's, of the wave's group."""
        config = self.call.config
        shape, chunk_blocks = self.query.values.shape[:2], config.xattention_block // config.block_size
        greatest = self.query.values.new_full(shape, -torch.inf)
        for place, scores, _ in self._scores(key):
            torch.maximum(greatest[place], scores.amax(-1), out=greatest[place])
        weights = torch.zeros(*shape, _num_chunks(self.call), dtype=torch.int32, device=key.device)
        unit = 2.0 ** (_WEIGHT_BITS - (chunk_blocks * self.per_block - 1).bit_length())
        for place, scores, blocks in self._scores(key):
            weight = scores.sub_(greatest[place].clamp(min=-1e300).unsqueeze(-1)).exp_().mul_(unit).round_().int()
            of_block = weight.unflatten(-1, (-1, self.per_block)).sum(-1, dtype=torch.int32)
            weights[place].index_add_(-1, blocks // chunk_blocks, of_block)
        for head in weights:
            yield self._chosen(head)

    def _scores(self, key: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
        """Tiles of scores against the keys of all ranks: their place among heads and groups, and the keys' blocks."""
        call, size = self.call, self.call.config.block_size
        step = max(1, SCRATCH_ELEMENTS // (8 * size * key.shape[-1]))
        for source, held in _travelling(key, call.shards.transport):
            blocks = call.shards.layout.blocks(source)
            for first in range(0, len(blocks), step):
                part = blocks[first : first + step]
                on_device, tokens = to_device(part, key.device), held[first * size : (first + step) * size]
                groups = _grouped(tokens, on_device, call, speaker=-1)
                values = fixed_point(groups.values.flatten(-2), self.key_exponent, self.bits)
                keys = _Groups(values, groups.number, groups.document)
                for place, scores in self._scores_of(keys, int(part[0]), int(part[-1])):
                    yield place, scores, on_device

    def _scores_of(
        self, keys: _Groups, first_block: int, last_block: int
    ) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """The tiles against some keys, of ``first_block`` to ``last_block``: of queries from ``first_block`` on."""
        query, step = self.query, max(1, SCRATCH_ELEMENTS // (len(keys.number) * self.per_block))
        edges = torch.searchsorted(self.host_blocks, torch.tensor([first_block, last_block + 1])).tolist()
        for head, (begin, end) in product(range(len(query.values)), pairwise([*edges, len(self.host_blocks)])):
            for block in range(begin, end, step):
                groups = slice(block * self.per_block, min(block + step, end) * self.per_block)
                place = (slice(head, head + 1), groups)
                scores = (query.values[place] @ keys.values.T).mul_(self.unit[place])
                hidden = keys.document != query.document[groups].unsqueeze(-1) if self.call.documents else None
                if begin == edges[0]:  # queries among the keys: the others come after all of them
                    is_later = keys.number > query.number[groups].unsqueeze(-1)
                    hidden = is_later if hidden is None else hidden | is_later
                yield place, scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)

    def _chosen(self, weights: Tensor) -> Tensor:
        """bool ``[query blocks, chunks]``, from int32 ``[query groups, chunks]``; a few blocks at a time."""
        weights = weights.unflatten(0, (-1, self.per_block))
        step = max(1, SCRATCH_ELEMENTS // weights[0].numel())
        parts = (slice(first, first + step) for first in range(0, len(weights), step))
        return torch.cat([self._chosen_part(weights[part], part) for part in parts])

    def _chosen_part(self, weights: Tensor, part: slice) -> Tensor:
        """bool ``[blocks, chunks]`` of some query blocks, from int32 ``[blocks, groups of a block, chunks]``."""
        call, config, blocks = self.call, self.call.config, self.blocks[part]
        size, chunk_blocks = config.block_size, config.xattention_block // config.block_size
        document = documents_of(blocks * size, call)
        group, of_group = (each.view(-1, self.per_block)[part] for each in (self.query.number, self.query.document))
        exists = group * config.xattention_stride < call.shards.layout.seq_len
        counts = (of_group == document.unsqueeze(-1)) & exists
        total = weights.sum(-1, keepdim=True).clamp(min=1)
        mass = (weights / total.double()).mul_(2.0**_MASS_BITS).round_().long()
        own = (blocks // chunk_blocks).unsqueeze(-1)
        mass = mass.masked_fill_(~counts.unsqueeze(-1), 0).sum(1)
        kept = keep_until(mass, own, threshold=config.xattention_threshold)
        chunk = torch.arange(kept.shape[1], device=kept.device)
        first = (first_tokens(call, kept.device)[document] // config.xattention_block).unsqueeze(-1)
        keeps_all = are_short(call, kept.device)[document].unsqueeze(-1)
        return kept | keeps_all & (chunk >= first) & (chunk <= own)


def keep_until(mass: Tensor, own: Tensor, *, threshold: float) -> Tensor:
    """Which chunks are kept: the own one, then from the greatest on until their mass reaches the share of all.

    Args:
        mass: int64 ``[blocks, chunks]``; a chunk without mass is not kept. Ties break by the lower chunk.
        own: int64 ``[blocks, 1]``: the chunk that is kept whatever its mass, and first.
        threshold: of the whole mass; what crosses it is kept too.
    """
    needed = mass.sum(1, keepdim=True).double() * threshold
    others = mass.scatter(1, own, 0)
    value, chunk = others.sort(dim=1, descending=True, stable=True)
    before = mass.gather(1, own) + value.cumsum(1) - value
    kept = torch.zeros_like(mass, dtype=torch.bool).scatter_(1, chunk, (before < needed) & (value > 0))
    return kept.scatter_(1, own, True)


def _travelling(key: Tensor, transport: Transport) -> Iterator[tuple[int, Tensor]]:
    """Each rank's keys and its number, this rank's first; the next ones are under way meanwhile."""
    for step in range(transport.size):
        transfer = transport.exchange(key) if step + 1 < transport.size else None
        yield (transport.rank - step) % transport.size, key
        if transfer is not None:
            key = transfer.wait()
