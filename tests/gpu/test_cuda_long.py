"""Sizes that broke others: a million tokens, more than 2**31 elements, strides past them, densities from end to end."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_mtraining import VerticalSlashIndex

from . import spot_checks
from .spot_checks import Problem

BF16 = torch.bfloat16
FREE_BYTES = 100 * 2**30
"""What the largest of these tests takes, with room."""

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "roomy_gpu")]


@pytest.fixture
def roomy_gpu():
    """Skips where another process or a smaller card leaves too little memory; hands cached memory back after."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < FREE_BYTES:
        pytest.skip(f"needs {FREE_BYTES / 2**30:.0f} GiB of free GPU memory, this one has {free / 2**30:.0f}")
    yield
    torch.cuda.empty_cache()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def random_lists(seq_len: int, heads: int, *, verticals: int, distances: int) -> VerticalSlashIndex:
    """``verticals`` columns and ``distances`` distances for every head, the sink and the diagonal among them."""
    num_blocks = -(-seq_len // 64)
    vertical = [[0, *random.sample(range(1, seq_len), verticals - 1)] for _ in range(heads)]
    slash = [[0, *random.sample(range(1, num_blocks), distances - 1)] for _ in range(heads)]
    return VerticalSlashIndex.from_lists([vertical], [slash], seq_len=seq_len, device="cuda")


def edges_and_random(seq_len: int, count: int) -> list[int]:
    """Positions at the sequence's ends and at edges of blocks, and ``count`` random ones."""
    edges = {0, 1, 63, 64, seq_len // 2, seq_len - 65, seq_len - 64, seq_len - 2, seq_len - 1}
    return sorted(edges | set(random.sample(range(seq_len), count)))


def check(problem: Problem, *, rows: int = 256, keys: int = 24) -> None:
    """Random rows and keys, and keys that are verticals of some head."""
    columns = random.sample(problem.lists(0)[0].tolist(), min(4, int(problem.index.num_vertical[0, 0])))
    spot_checks.check(
        problem,
        rows=edges_and_random(problem.seq_len, rows),
        keys=sorted({*edges_and_random(problem.seq_len, keys), *columns}),
    )


def test_a_million_tokens():
    seq_len, heads, kv_heads = 2**20, 32, 4
    index = random_lists(seq_len, heads, verticals=1152, distances=128)
    shapes = [(1, seq_len, h, 128) for h in (heads, kv_heads, kv_heads, heads)]
    check(Problem(*(normal(*shape) for shape in shapes), index))


@pytest.mark.parametrize(("seq_len", "head_dim"), [(2**18, 128), (2**18 + 33, 64)])
def test_inputs_and_gradient_whose_offsets_pass_two_to_the_31(seq_len, head_dim):
    """Query, key and value are views of one buffer, and the gradient has every second channel block of another."""
    heads, kv_heads, wide = 64, 2, 128 // head_dim
    fused = normal(1, seq_len, (heads + 2 * kv_heads) * wide, head_dim)
    query, key, value, _ = fused.split([heads, kv_heads, kv_heads, fused.shape[2] - heads - 2 * kv_heads], 2)
    grad_out = normal(1, seq_len, heads, 2 * 128)[..., 128 : 128 + head_dim]
    assert fused.numel() > 2**31 and (seq_len - 1) * grad_out.stride(1) > 2**31
    check(Problem(query, key, value, grad_out, random_lists(seq_len, heads, verticals=20, distances=3)))


def test_a_strided_gradient_of_more_than_two_to_the_31_elements():
    """2097153 queries, one more than a power of two, and a gradient that lies head by head."""
    seq_len, heads = 2**21 + 1, 16
    shapes = [(1, seq_len, h, 64) for h in (heads, 1, 1)]
    grad_out = normal(1, heads, seq_len, 64).transpose(1, 2)
    assert grad_out.numel() > 2**31 and not grad_out.is_contiguous()
    index = random_lists(seq_len, heads, verticals=5, distances=3)
    check(Problem(*(normal(*shape) for shape in shapes), grad_out, index))


@pytest.mark.parametrize(("verticals", "distances"), [(1, 1), (64, 1), (8, 2)])
def test_a_thousandth_of_the_pairs(verticals, distances):
    """0.05 to 0.2 % kept."""
    seq_len, heads = 2**17 - 31, 8
    shapes = [(1, seq_len, h, 128) for h in (heads, 2, 2, heads)]
    index = random_lists(seq_len, heads, verticals=verticals, distances=distances)
    check(Problem(*(normal(*shape) for shape in shapes), index))


def test_every_pair():
    seq_len, heads = 2**14 - 5, 4
    shapes = [(1, seq_len, h, 128) for h in (heads, 2, 2, heads)]
    index = VerticalSlashIndex.dense(rows=1, num_heads=heads, seq_len=seq_len, device="cuda")
    check(Problem(*(normal(*shape) for shape in shapes), index))
