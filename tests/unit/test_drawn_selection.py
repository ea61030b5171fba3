"""Selections on drawn problems: what their definitions choose, and the same for every number of ranks and layout.

The definitions judge float64 numbers that no two sums share. On numbers with ties, and in low precision, a selection is
held to what must be true of any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from megatron_mtraining import BlockListIndex, MTrainingConfig, VerticalSlashIndex, select
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.types import AttentionIndex
from tests.draws import SEEDS, block_list_configs, examples, layouts, packs, spans_of, vertical_slash_configs

from .attention_inputs import as_cu_seqlens
from .brute_patterns import moba_mask, xattention_blocks
from .brute_selection import Lists, brute_force, lists_of

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "with ties": lambda normal: (2 * normal).round() / 2,
    "all equal": torch.ones_like,
    "zero": torch.zeros_like,
    "large": lambda normal: 100 * normal,
    "normal": lambda normal: normal,
}
"""What queries and keys are made of standard normal numbers."""

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


class Problem(NamedTuple):
    """One selection, on one device or on ranks."""

    layout: SequenceLayout
    config: MTrainingConfig
    bounds: tuple[int, ...] | None
    heads: tuple[int, int]
    batch: int
    head_dim: int
    softmax_scale: float | None

    @property
    def options(self) -> dict[str, object]:
        """What every selection takes beside tensors and configuration."""
        return {"softmax_scale": self.softmax_scale, "cu_seqlens": as_cu_seqlens(self.bounds)}

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Tokens of each document, or batch row."""
        return spans_of(self.bounds, batch=self.batch, seq_len=self.layout.seq_len)

    def tensors(self, seed: int, numbers: str = "normal", dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """Query and key."""
        torch.manual_seed(seed)
        sizes = ((self.batch, self.layout.seq_len, number, self.head_dim) for number in self.heads)
        return tuple(2 * NUMBERS[numbers](torch.randn(size, dtype=torch.float64)).to(dtype) for size in sizes)

    def alone(self, query: Tensor, key: Tensor) -> AttentionIndex:
        """What one device selects."""
        return select(query, key, self.config, **self.options)

    def on_ranks(self, query: Tensor, key: Tensor) -> list[AttentionIndex]:
        """What each rank selects."""

        def body(group):
            local = (shard_sequence(each, self.layout, cp_rank=group.rank, dim=1) for each in (query, key))
            return select(*local, self.config, layout=self.layout, groups=group, **self.options)

        return RankSimulator(self.layout.cp_size, timeout=300.0).run(body)


@st.composite
def problems(draw: Callable, configs: Callable, *, most_tokens: int) -> Problem:
    """Problems with configurations for the blocks of their layouts."""
    layout = draw(layouts(most_ranks=6, most_tokens=most_tokens))
    cuts = draw(packs(layout.seq_len, layout.block_size))
    num_kv_heads = draw(st.integers(1, 2))
    return Problem(
        layout=layout,
        config=draw(configs(layout.block_size)),
        bounds=cuts,
        heads=(num_kv_heads * draw(st.integers(1, 3)), num_kv_heads),
        batch=draw(st.integers(1, 2)) if cuts is None else 1,
        head_dim=draw(st.sampled_from([8, 1, 3])),
        softmax_scale=draw(st.sampled_from([None, 1.0, 0.02])),
    )


VERTICAL_SLASH = problems(vertical_slash_configs, most_tokens=128)
BLOCK_LISTS = problems(block_list_configs, most_tokens=96)


def assert_same(index: VerticalSlashIndex, other: VerticalSlashIndex) -> None:
    assert all(torch.equal(*pair) for pair in zip(index.tensors, other.tensors, strict=True))


@given(seed=SEEDS, problem=VERTICAL_SLASH)
@examples(16)
def test_vertical_slash_is_its_definition_on_any_ranks(seed, problem):
    query, key = problem.tensors(seed)
    alone = problem.alone(query, key)
    expected = brute_force(query, key, problem.config, **problem.options)
    assert lists_of(alone, seq_len=problem.layout.seq_len) == expected
    for index in problem.on_ranks(query, key):
        assert_same(index, alone)


@given(seed=SEEDS, problem=VERTICAL_SLASH, numbers=st.sampled_from(list(NUMBERS)), dtype=DTYPES)
@examples(16)
def test_vertical_slash_keeps_its_rules_on_any_numbers(seed, problem, numbers, dtype):
    tensors = problem.tensors(seed, numbers, dtype)
    check_rules(lists_of(problem.alone(*tensors), seq_len=problem.layout.seq_len), problem)
    first, *others = problem.on_ranks(*tensors)
    check_rules(lists_of(first, seq_len=problem.layout.seq_len), problem)
    for index in others:
        assert_same(index, first)


def check_rules(lists: Lists, problem: Problem) -> None:
    """What is always kept is there, in reach, and no more beside it than the caps allow."""
    config = problem.config
    sink_tokens, local_blocks = config.sink_tokens, config.local_blocks
    most_verticals, most_slashes = config.max_vertical, config.max_slash
    if config.budget == "cost":
        most_verticals, most_slashes = -(-problem.layout.seq_len // 16), problem.layout.num_blocks
    elif config.budget == "top_p_literal":
        sink_tokens, local_blocks = 0, 1
    for (start, stop), row in zip(problem.spans, lists, strict=True):
        reach = max(stop - 1, start) // config.block_size - start // config.block_size
        for vertical, slash in row:
            if stop - start <= config.dense_below:
                assert (vertical, slash) == ([], list(range(reach + 1)))
                continue
            if config.budget == "cost" and not config.max_density and (vertical, slash) == ([], [*range(reach + 1)]):
                continue
            sinks = set(range(start, min(start + sink_tokens, stop)))
            local = set(range(min(local_blocks, reach + 1)))
            assert sinks <= set(vertical) <= set(range(start, stop))
            assert local <= set(slash) <= set(range(reach + 1))
            assert len(set(vertical) - sinks) <= most_verticals
            assert len(set(slash) - local) <= most_slashes


@given(seed=SEEDS, problem=BLOCK_LISTS)
@examples(16)
def test_block_lists_are_their_definition(seed, problem):
    query, key = problem.tensors(seed)
    index = problem.alone(query, key)
    if isinstance(index, VerticalSlashIndex):
        assert all(stop - start <= problem.config.dense_below for start, stop in problem.spans)
        return
    if problem.config.pattern == "moba":
        masks = {"seq_len": problem.layout.seq_len, "cu_seqlens": problem.options["cu_seqlens"]}
        everything = VerticalSlashIndex.dense(
            rows=len(problem.spans), num_heads=1, seq_len=masks["seq_len"], block_size=index.block_size
        )
        expected = moba_mask(query, key, problem.config, problem.bounds) & allowed_mask(everything, **masks)
        assert torch.equal(allowed_mask(index, **masks), expected)
    else:
        scale = problem.softmax_scale
        expected = xattention_blocks(query, key, problem.config, problem.bounds, softmax_scale=scale)
        kept = [each.nonzero().flatten().tolist() for each in expected.flatten(0, 2)]
        assert [chunks for chunks, _ in lists_of_blocks(index)] == kept


@given(seed=SEEDS, problem=BLOCK_LISTS, numbers=st.sampled_from(list(NUMBERS)), dtype=DTYPES | st.just(torch.float64))
@examples(16)
def test_block_lists_are_the_same_on_any_ranks(seed, problem, numbers, dtype):
    tensors = problem.tensors(seed, numbers, dtype)
    alone, ranks = problem.alone(*tensors), problem.on_ranks(*tensors)
    for rank, index in enumerate(ranks):
        if isinstance(alone, VerticalSlashIndex):
            assert_same(index, alone)
        else:
            blocks = problem.layout.blocks(rank)
            assert torch.equal(index.query_blocks, blocks)
            assert lists_of_blocks(index) == lists_of_blocks(alone, blocks)


def lists_of_blocks(index: BlockListIndex, blocks: Tensor | None = None) -> list[tuple[list[int], list[int] | None]]:
    """Chunks and row masks of each batch row, head and block; of all blocks, or of some in their order."""
    starts = index.starts.unfold(2, 2, 1)
    if blocks is not None:
        starts = starts[:, :, blocks]
    entries = [slice(*edges) for edges in starts.flatten(0, 2).tolist()]
    masks = index.row_masks
    return [(index.chunks[each].tolist(), None if masks is None else masks[each].tolist()) for each in entries]
