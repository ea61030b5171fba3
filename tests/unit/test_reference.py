"""The reference backend against the dense float64 oracle: forward, lse and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.testing.error_budget import run_with_gradients
from megatron_mtraining.testing.oracle import oracle_attention
from megatron_mtraining.types import VerticalSlashIndex
from tests.draws import examples

from .attention_inputs import as_cu_seqlens, random_index, random_inputs

TOLERANCE = 1e-10


def assert_matches_oracle(
    inputs: tuple[Tensor, Tensor, Tensor],
    index: VerticalSlashIndex,
    *,
    cu_seqlens: Sequence[int] | None = None,
    softmax_scale: float | None = None,
) -> None:
    """Compares out, lse and the gradients of a random function of both."""
    options = {"cu_seqlens": as_cu_seqlens(cu_seqlens), "softmax_scale": softmax_scale}
    batch, seq_len, heads, _ = inputs[0].shape
    grads = {
        "grad_out": torch.randn(inputs[0].shape, dtype=torch.float64),
        "grad_lse": torch.randn(batch, heads, seq_len, dtype=torch.float64),
    }
    ours = run_with_gradients(lambda *qkv: sparse_attention(*qkv, index=index, **options), *inputs, **grads)
    exact = run_with_gradients(lambda *qkv: oracle_attention(*qkv, index, **options), *inputs, **grads)
    for name, result in ours.items():
        torch.testing.assert_close(
            result, exact[name], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("block_size", "seq_len", "heads", "kv_heads", "head_dim", "batch"),
    [
        (4, 1, 2, 1, 8, 1),
        (4, 5, 4, 2, 24, 2),
        (4, 63, 4, 4, 8, 1),
        (4, 130, 4, 1, 8, 2),
        (8, 65, 4, 2, 40, 2),
        (8, 130, 2, 2, 24, 1),
        (64, 1, 1, 1, 16, 2),
        (64, 63, 4, 1, 24, 1),
        (64, 65, 8, 2, 16, 2),
        (64, 130, 4, 2, 40, 1),
        (64, 1025, 2, 1, 16, 1),
    ],
)
def test_random_index(block_size: int, seq_len: int, heads: int, kv_heads: int, head_dim: int, batch: int) -> None:
    index = random_index(batch, heads, seq_len, block_size)
    assert_matches_oracle(random_inputs(batch, seq_len, heads, kv_heads, head_dim), index)


@pytest.mark.parametrize(
    ("vertical", "slash"),
    [
        pytest.param([], [0], id="only-diagonal"),
        pytest.param([], [0, 3, 7], id="no-vertical"),
        pytest.param([0, 1, 20, 41, 69], [0], id="verticals-and-diagonal"),
        pytest.param(range(70), [0], id="everything-vertical"),
        pytest.param(range(70), range(9), id="everything-twice"),
        pytest.param([0, 16, 17, 18, 40], [0, 1, 2, 3], id="verticals-inside-slashes"),
    ],
)
def test_special_lists(vertical: Sequence[int], slash: Sequence[int]) -> None:
    index = VerticalSlashIndex.from_lists([[vertical] * 2], [[slash] * 2], seq_len=70, block_size=8)
    assert_matches_oracle(random_inputs(1, 70, 2, 1, 24), index)


@pytest.mark.parametrize("seq_len", [1, 8, 67])
def test_dense_index_is_causal_attention(seq_len: int) -> None:
    index = VerticalSlashIndex.dense(rows=2, num_heads=4, seq_len=seq_len, block_size=8)
    assert index.slash.stride(0) == index.slash.stride(1) == 0, "the dense index is one list, seen by all heads"
    inputs = random_inputs(2, seq_len, 4, 2, 16)
    assert_matches_oracle(inputs, index)
    query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out = sparse_attention(*inputs, index=index).out
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_key_in_both_lists_counts_once() -> None:
    """With equal scores the mean of the kept values tells how often each was counted."""
    index = VerticalSlashIndex.from_lists([[[0, 1, 5]]], [[[0, 1]]], seq_len=8, block_size=4)
    query, key = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4)
    value = torch.arange(8.0).view(1, 8, 1, 1).expand(1, 8, 1, 4)
    result = sparse_attention(query, key, value, index=index)
    torch.testing.assert_close(result.out[0, :, 0, 0], torch.arange(8.0) / 2)
    torch.testing.assert_close(result.lse[0, 0], torch.arange(1.0, 9.0).log())


DOCUMENTS = [
    pytest.param([0, 65], id="one"),
    pytest.param([0, 13, 65], id="odd-start"),
    pytest.param([0, 0, 1, 1, 2, 30, 30, 65, 65], id="lengths-0-and-1"),
    pytest.param([0, 3, 8, 11, 12, 40, 65], id="several-in-a-block"),
    pytest.param([0, 9, 17, 25, 37, 45, 57, 65], id="shorter-than-a-window"),
    pytest.param(list(range(66)), id="one-token-each"),
]


@pytest.mark.parametrize("cu_seqlens", DOCUMENTS)
@pytest.mark.parametrize("block_size", [4, 64])
def test_packed_documents(cu_seqlens: list[int], block_size: int) -> None:
    index = random_index(len(cu_seqlens) - 1, 4, 65, block_size, cu_seqlens=cu_seqlens)
    assert_matches_oracle(random_inputs(1, 65, 4, 2, 8), index, cu_seqlens=cu_seqlens)


def test_dense_documents() -> None:
    bounds = [0, 9, 17, 25, 37, 45, 57]
    index = VerticalSlashIndex.dense(rows=6, num_heads=2, seq_len=57, block_size=8)
    assert_matches_oracle(random_inputs(1, 57, 2, 1, 8), index, cu_seqlens=bounds)


def test_verticals_of_other_documents_are_ignored() -> None:
    """A list should name its document's positions only; others do not open a way into their document."""
    index = random_index(4, 2, 65, 8, max_vertical=40)
    assert_matches_oracle(random_inputs(1, 65, 2, 1, 8), index, cu_seqlens=[0, 13, 14, 50, 65])


@pytest.mark.parametrize("cu_seqlens", [None, [0, 13, 13, 33]])
def test_lists_without_room_for_a_vertical(cu_seqlens: list[int] | None) -> None:
    index = random_index(1 if cu_seqlens is None else 3, 2, 33, 8, cu_seqlens=cu_seqlens, max_vertical=0)
    tables = (index.vertical[..., :0], index.num_vertical, index.slash, index.num_slash)
    index = VerticalSlashIndex(*tables, block_size=8)
    assert_matches_oracle(random_inputs(1, 33, 2, 1, 8), index, cu_seqlens=cu_seqlens)


def test_documents_do_not_see_each_other() -> None:
    """A change of one document's keys and values leaves the others' results as they are, bit for bit."""
    bounds = [0, 21, 22, 50]
    index = random_index(3, 2, 50, 8, cu_seqlens=bounds)
    query, key, value = random_inputs(1, 50, 2, 2, 8)
    first = sparse_attention(query, key, value, index=index, cu_seqlens=as_cu_seqlens(bounds))
    key, value = key.clone(), value.clone()
    key[:, 21], value[:, 21] = 100.0, 100.0
    second = sparse_attention(query, key, value, index=index, cu_seqlens=as_cu_seqlens(bounds))
    others = [*range(21), *range(22, 50)]
    assert torch.equal(first.out[:, others], second.out[:, others])
    assert torch.equal(first.lse[..., others], second.lse[..., others])


def test_strided_inputs() -> None:
    """A slice of a fused projection, heads first in memory, and every other number of a wider tensor."""
    index = random_index(2, 4, 37, 8)
    fused = torch.randn(2, 37, 4, 3 * 16, dtype=torch.float64)
    heads_first = torch.randn(2, 2, 37, 16, dtype=torch.float64).transpose(1, 2)
    wide = torch.randn(37, 2, 2, 32, dtype=torch.float64).transpose(0, 1)[..., ::2]
    inputs = (fused[..., 16:32], heads_first, wide)
    assert not any(tensor.is_contiguous() for tensor in inputs)
    assert_matches_oracle(inputs, index)


@pytest.mark.parametrize("softmax_scale", [1.0, 0.03, 3.0])
def test_softmax_scale(softmax_scale: float) -> None:
    assert_matches_oracle(random_inputs(1, 37, 2, 1, 24), random_index(1, 2, 37, 8), softmax_scale=softmax_scale)


@examples(25)
@given(
    block_size=st.sampled_from([1, 3, 4, 16]),
    seq_len=st.integers(1, 48),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 12),
    cuts=st.none() | st.lists(st.floats(0, 1), max_size=6),
)
def test_any_small_case(
    block_size: int, seq_len: int, kv_heads: int, group: int, head_dim: int, cuts: list[float] | None
) -> None:
    bounds = None if cuts is None else [0, *sorted(round(cut * seq_len) for cut in cuts), seq_len]
    rows = 2 if bounds is None else len(bounds) - 1
    index = random_index(rows, kv_heads * group, seq_len, block_size, cu_seqlens=bounds)
    inputs = random_inputs(2 if bounds is None else 1, seq_len, kv_heads * group, kv_heads, head_dim)
    assert_matches_oracle(inputs, index, cu_seqlens=bounds)
