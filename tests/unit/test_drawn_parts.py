"""Drawn cuts of the keys: steps one after the other, and partial results merged, are the attention over all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from megatron_mtraining import merge_partials, sparse_attention
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.testing.error_budget import run_with_gradients
from megatron_mtraining.testing.oracle import oracle_attention
from megatron_mtraining.types import AttentionIndex, AttentionOutput, BlockListIndex, Documents, VerticalSlashIndex
from tests.draws import SEEDS, examples, index_of_kinds, kinds_of_lists, packs, spans_of

from .attention_inputs import as_cu_seqlens, random_inputs

BACKEND = ReferenceBackend()


class Sizes(NamedTuple):
    """Everything about a problem but its numbers."""

    seq_len: int
    block_size: int
    cuts: tuple[int, ...] | None
    heads: tuple[int, int, int]
    """Of queries, of keys, and lists."""

    head_dim: int
    scale: float

    @property
    def num_blocks(self) -> int:
        """Blocks, a short last one included."""
        return -(-self.seq_len // self.block_size)

    @property
    def batch(self) -> int:
        """Two rows, one where documents are packed."""
        return 2 if self.cuts is None else 1

    @property
    def options(self) -> dict[str, object]:
        """What attention takes beside tensors and index."""
        return {"softmax_scale": self.scale, "cu_seqlens": as_cu_seqlens(self.cuts)}

    def tensors(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Query, key and value; the gradients of ``out`` and ``lse``."""
        inputs = random_inputs(self.batch, self.seq_len, *self.heads[:2], self.head_dim)
        grad_lse = torch.randn(self.batch, self.heads[0], self.seq_len, dtype=torch.float64)
        return inputs, {"grad_out": torch.randn_like(inputs[0]), "grad_lse": grad_lse}


@st.composite
def sizes(draw: Callable) -> Sizes:
    seq_len, block_size = draw(st.integers(1, 48)), draw(st.sampled_from([4, 1, 3, 7, 16]))
    num_kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Sizes(
        seq_len,
        block_size,
        draw(packs(seq_len, block_size)),
        (num_kv_heads * group, num_kv_heads, num_kv_heads * draw(st.sampled_from([1, group]))),
        draw(st.integers(1, 9)),
        draw(st.sampled_from([0.3, 1.0, 5.0])),
    )


def random_parts(num_blocks: int, *, at_most: int) -> list[list[int]]:
    """Blocks in any order, cut anywhere; a block that may be short stands last in its part."""
    blocks = random.sample(range(num_blocks), num_blocks)
    edges = sorted(random.sample(range(1, num_blocks), random.randint(0, min(num_blocks, at_most) - 1)))
    parts = [blocks[low:high] for low, high in zip([0, *edges], [*edges, num_blocks], strict=True)]
    return [sorted(part, key=(num_blocks - 1).__eq__) for part in parts]


def tokens_of(blocks: list[int], of: Sizes) -> Tensor:
    """Positions of the tokens of some blocks, in their order."""
    positions = (torch.tensor(blocks)[:, None] * of.block_size + torch.arange(of.block_size)).flatten()
    return positions[positions < of.seq_len]


def random_lists(of: Sizes, chunk_blocks: int) -> tuple[BlockListIndex, BlockListIndex, BlockListIndex]:
    """Two indices without a pair in common, and that of both; lists and row masks of any length and kind."""
    num_chunks = -(-of.num_blocks // chunk_blocks)
    names = ("first", "second", "both")
    lists, masks = ({name: [] for name in names} for _ in range(2))
    for _ in range(of.batch * of.heads[2] * of.num_blocks):
        bits = [
            [random.choice([0, -1, random.getrandbits(of.block_size)]) for _ in range(num_chunks)] for _ in names[:2]
        ]
        parts = {"first": bits[0], "second": [b & ~a for a, b in zip(*bits, strict=True)]}
        parts["both"] = [a | b for a, b in zip(*bits, strict=True)]
        for name, rows in parts.items():
            lists[name].append([chunk for chunk, row in enumerate(rows) if row])
            masks[name].append([row for row in rows if row])

    def nested(flat: list) -> list:
        size = of.num_blocks
        heads = [flat[first : first + size] for first in range(0, len(flat), size)]
        return [heads[first : first + of.heads[2]] for first in range(0, len(heads), of.heads[2])]

    options = {"chunk_blocks": chunk_blocks, "block_size": of.block_size}
    return tuple(BlockListIndex.from_lists(nested(lists[name]), nested(masks[name]), **options) for name in names)


def assert_equal(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    for name, result in ours.items():
        torch.testing.assert_close(result, exact[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@given(seed=SEEDS, of=sizes(), kinds=st.none() | kinds_of_lists, chunk_blocks=st.integers(1, 4))
@examples(10)
def test_steps_over_parts_of_the_keys(seed, of, kinds, chunk_blocks):
    """Queries in parts too, as ranks have them; each part meets the keys in parts of its own."""
    random.seed(seed)
    torch.manual_seed(seed)
    inputs, grads = of.tensors()
    if kinds is None:
        *_, index = random_lists(of, chunk_blocks)
    else:
        spans = spans_of(of.cuts, batch=of.batch, seq_len=of.seq_len)
        places = {"seq_len": of.seq_len, "block_size": of.block_size, "stride": 2}
        index = index_of_kinds(kinds, spans, of.heads[2], **places)
    exact = run_with_gradients(lambda *qkv: oracle_attention(*qkv, index, **of.options), *inputs, **grads)
    steps = Steps(of, inputs, grads, index)
    for blocks in random_parts(of.num_blocks, at_most=3):
        steps.take_queries(blocks)
    assert_equal(steps.results(), exact)


class Steps:
    """The steps of one rank's queries after the other, and what they add to the gradients of all keys."""

    def __init__(self, of: Sizes, inputs: tuple[Tensor, ...], grads: dict[str, Tensor], index: AttentionIndex) -> None:
        self.of, self.index, self.grads = of, index, grads
        self.query, self.key, self.value = inputs
        documents = None if of.cuts is None else Documents(of.cuts)
        self.whole = BlockGeometry.whole(seq_len=of.seq_len, block_size=of.block_size, documents=documents)
        self.found = {name: torch.empty_like(self.query) for name in ("out", "grad_query")}
        self.found["lse"] = torch.empty_like(grads["grad_lse"])
        self.grad_keys = torch.zeros(2, *self.key.shape, dtype=torch.float64)
        self.packed = self.grad_packed = None
        if isinstance(index, VerticalSlashIndex):
            self.packed = ReferenceBackend().pack(self.key, self.value, index, self.whole)
            self.grad_packed = torch.zeros_like(self.packed)

    def take_queries(self, blocks: list[int]) -> None:
        """Forward and backward of some blocks of queries."""
        rows = tokens_of(blocks, self.of)
        index = self.index if self.packed is not None else lists_of_blocks(self.index, blocks)
        parts = random_parts(self.of.num_blocks, at_most=6)
        steps = [
            (
                tokens_of(part, self.of),
                replace(self.whole, query_blocks=torch.tensor(blocks), key_blocks=torch.tensor(part)),
                {"softmax_scale": self.of.scale, "is_last": part is parts[-1]},
            )
            for part in parts
        ]
        result = self._forward(self.query[:, rows], index, steps)
        self.found["out"][:, rows], self.found["lse"][:, :, rows] = result
        self.found["grad_query"][:, rows] = self._backward(rows, result, index, steps)

    def _forward(self, query: Tensor, index: AttentionIndex, steps: list[tuple]) -> AttentionOutput:
        result = None
        for at, geometry, options in steps:
            held = (query, self.key[:, at], self.value[:, at])
            packed = self.packed if result is None else None
            result = BACKEND.forward(*held, index, geometry, packed=packed, previous=result, **options)
        return result

    def _backward(self, rows: Tensor, result: AttentionOutput, index: AttentionIndex, steps: list[tuple]) -> Tensor:
        grad_out, grad_query = self.grads["grad_out"][:, rows], None
        delta = ReferenceBackend().softmax_delta(grad_out, result.out, self.grads["grad_lse"][:, :, rows])
        for at, geometry, options in steps:
            held = (grad_out, self.query[:, rows], self.key[:, at], self.value[:, at])
            common = (result.lse, delta, index, geometry)
            options = options | {"packed": self.packed if grad_query is None else None}
            grad_query, part, of_packed = BACKEND.backward(*held, *common, previous=grad_query, **options)
            assert (of_packed is None) == (options["packed"] is None)
            if of_packed is not None:
                self.grad_packed += of_packed
            self.grad_keys[:, :, at] += part
        return grad_query

    def results(self) -> dict[str, Tensor]:
        """All that :func:`run_with_gradients` returns."""
        grads = self.grad_keys
        if self.packed is not None:
            grads = ReferenceBackend().unpack(
                self.grad_packed, self.index, self.whole, grad_kv=grads, dtype=grads.dtype
            )
        return self.found | dict(zip(("grad_key", "grad_value"), grads, strict=True))


def lists_of_blocks(index: BlockListIndex, blocks: list[int]) -> BlockListIndex:
    """Those of some blocks of queries, in that order."""
    chunks, masks = (
        [
            [
                [table[slice(*index.starts[row, head, block : block + 2].tolist())].tolist() for block in blocks]
                for head in range(index.num_lists)
            ]
            for row in range(index.rows)
        ]
        for table in (index.chunks, index.row_masks)
    )
    sizes = {"chunk_blocks": index.chunk_blocks, "block_size": index.block_size}
    return BlockListIndex.from_lists(chunks, masks, **sizes, query_blocks=torch.tensor(blocks))


@given(seed=SEEDS, of=sizes(), chunk_blocks=st.integers(1, 4))
@examples(10)
def test_merged_partials(seed, of, chunk_blocks):
    """Gradients go through the merge into both; rows without a key in one of them, or in both, are frequent."""
    random.seed(seed)
    torch.manual_seed(seed)
    inputs, grads = of.tensors()
    *halves, both = random_lists(of, chunk_blocks)

    def merged(*qkv: Tensor) -> AttentionOutput:
        return merge_partials(*(sparse_attention(*qkv, index=index, **of.options) for index in halves))

    exact = run_with_gradients(lambda *qkv: oracle_attention(*qkv, both, **of.options), *inputs, **grads)
    assert_equal(run_with_gradients(merged, *inputs, **grads), exact)
