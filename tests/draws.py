"""What tests on drawn problems draw: packs, lists and rings, the awkward ones as often as the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import settings

from megatron_mtraining.config import INDEX_SHARINGS, LAYOUTS, LOCAL_PATTERNS, SCHEDULES, MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.types import VerticalSlashIndex

SEEDS = st.integers(0, 2**16)
"""Of what a problem's tensors and lists are made of."""

LISTS = ("none", "few", "many", "all", "near the start", "near the end", "one stride")
"""Kinds of lists of columns, or of distances."""


def examples(count: int) -> settings:
    """Draws ``count`` problems where draws are repeatable, and in a soak as many as that asks for."""
    profile = settings()
    return settings(max_examples=count if profile.derandomize else profile.max_examples)


class Ring(NamedTuple):
    """Ranks, where their tokens live, and how keys come by."""

    layout: SequenceLayout
    inner_size: int | None
    """Ranks in a node; None without inner and outer groups."""

    schedule: str


@st.composite
def bounds(draw: Callable, seq_len: int, block_size: int) -> tuple[int, ...]:
    """Of packed documents of any length, often 0 or 1 or about a block, with the rest of the sequence as the last."""
    length = st.sampled_from([0, 1, 2, block_size - 1, block_size, block_size + 1]) | st.integers(0, seq_len)
    ends = accumulate(draw(st.lists(length, max_size=8)))
    return (0, *(end for end in ends if end <= seq_len), seq_len)


def packs(seq_len: int, block_size: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    """Bounds of documents, and a third of the time None."""
    some = bounds(seq_len, block_size)
    return some | some | st.none()


@st.composite
def layouts(draw: Callable, *, most_ranks: int = 8, most_tokens: int = 128) -> SequenceLayout:
    """Up to eight ranks with blocks of any size; on one rank the last block may be short."""
    kind, cp_size = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, most_ranks))
    block_size = draw(st.sampled_from([size for size in (4, 1, 2, 3, 5, 8, 16) if 2 * size * cp_size <= most_tokens]))
    multiple = SequenceLayout.required_multiple(kind, cp_size=cp_size, block_size=block_size)
    return SequenceLayout(
        kind,
        seq_len=multiple * draw(st.integers(1, most_tokens // multiple)),
        cp_size=cp_size,
        block_size=block_size,
        node_size=draw(st.sampled_from(_divisors(cp_size))),
    )


@st.composite
def rings(draw: Callable, **sizes: int) -> Ring:
    """Rings over drawn layouts, whose nodes need not be those of the inner rings."""
    layout = draw(layouts(**sizes))
    inner_size = draw(st.sampled_from([*_divisors(layout.cp_size), None]))
    return Ring(layout, inner_size, draw(st.sampled_from(SCHEDULES)))


@st.composite
def vertical_slash_configs(draw: Callable, block_size: int) -> MTrainingConfig:
    """Every field that this selection reads, at test sizes."""
    pieces = draw(st.integers(1, 4))
    budget = draw(st.sampled_from(["cost", "cost", "top_p", "fixed", "top_p_literal"]))
    run_length = 1 if budget == "cost" else draw(st.integers(1, 4))
    shares = st.sampled_from([0.5, 1e-9, 0.9, 1.0]) | st.floats(0.01, 1.0)
    return MTrainingConfig(
        budget=budget,
        estimator=draw(st.sampled_from(["last_window", "probe_windows"])),
        target_recall=draw(shares),
        max_density=draw(st.none() | st.floats(0.01, 1.0)),
        dense_above=draw(shares),
        index_sharing=draw(st.sampled_from(INDEX_SHARINGS)),
        num_probe_rows=pieces * draw(st.integers(1, 8)),
        num_probe_windows=pieces,
        sink_tokens=draw(st.sampled_from([0, 0, 1, 3, 9])),
        local_blocks=draw(st.integers(1, 5)),
        vertical_top_p=draw(shares),
        slash_top_p=draw(shares),
        max_vertical=draw(st.integers(1, 20) | st.sampled_from([0, 1000])),
        max_slash=draw(st.just(0) | st.integers(run_length, 12) | st.just(1000)),
        slash_run_length=run_length,
        dense_below=draw(st.sampled_from([0, 0, 0, 1, 5, 30])),
        block_size=block_size,
    )


@st.composite
def block_list_configs(draw: Callable, block_size: int) -> MTrainingConfig:
    """The patterns whose lists are a rank's own, at test sizes.

    XAttention's definition has no least mass, its selection has one: at a threshold of 1 they differ by what is less.
    """
    strides = [stride for stride in range(1, block_size + 1) if block_size % stride == 0]
    return MTrainingConfig(
        pattern=draw(st.sampled_from(LOCAL_PATTERNS)),
        moba_chunk=block_size * draw(st.integers(1, 5)),
        moba_top_k=draw(st.integers(1, 6)),
        xattention_block=block_size * draw(st.integers(1, 5)),
        xattention_stride=draw(st.sampled_from(strides)),
        xattention_threshold=draw(st.floats(0.05, 0.99)),
        dense_below=draw(st.sampled_from([0, 0, 0, 1, 5, 30])),
        block_size=block_size,
    )


kinds_of_lists = st.lists(st.tuples(st.sampled_from(LISTS), st.sampled_from(LISTS)), min_size=1, max_size=4)
"""Kinds of columns and of distances, for :func:`index_of_kinds`."""


def index_of_kinds(
    kinds: Sequence[tuple[str, str]],
    spans: Sequence[tuple[int, int]],
    num_lists: int,
    *,
    seq_len: int,
    block_size: int,
    stride: int,
) -> VerticalSlashIndex:
    """An index with a row for each of ``spans``, whose lists are of ``kinds`` in turn.

    Columns are those of the span; in some rows of the whole sequence, where those of other documents keep nothing.
    """
    num_blocks, vertical, slash = -(-seq_len // block_size), [], []
    for row, (start, stop) in enumerate(spans):
        of_row = [kinds[(row * num_lists + number) % len(kinds)] for number in range(num_lists)]
        columns = random.choice([range(start, stop), range(start, stop), range(seq_len)])
        vertical.append([_some_of(columns, kind, near=block_size, stride=stride * block_size) for kind, _ in of_row])
        distances = range(num_blocks)
        slash.append([[0, *_some_of(distances, kind, near=2, stride=stride)] for _, kind in of_row])
    return VerticalSlashIndex.from_lists(vertical, slash, seq_len=seq_len, block_size=block_size)


def spans_of(cuts: Sequence[int] | None, *, batch: int, seq_len: int) -> list[tuple[int, int]]:
    """What each row of an index speaks for."""
    return [(0, seq_len)] * batch if cuts is None else list(pairwise(cuts))


def _some_of(items: range, kind: str, *, near: int, stride: int) -> Sequence[int]:
    if kind == "few":
        return random.sample(items, min(len(items), random.randint(0, 3)))
    if kind == "many":
        return random.sample(items, random.randint(0, len(items)))
    if kind == "one stride":
        return items[random.randrange(stride) :: stride]
    return {"none": (), "all": items, "near the start": items[:near], "near the end": items[-near:]}[kind]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
