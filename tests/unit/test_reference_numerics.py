"""Low precision, extreme scores and bounded memory of the reference backend."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    gradient_rounding,
    nan_filled_empty,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import oracle_attention
from megatron_mtraining.types import VerticalSlashIndex

from .attention_inputs import as_cu_seqlens, random_index, random_inputs


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize(
    ("block_size", "seq_len", "heads", "kv_heads", "head_dim", "bounds"),
    [
        (8, 67, 4, 2, 24, None),
        (64, 130, 4, 1, 64, None),
        (64, 257, 2, 2, 128, None),
        (64, 300, 2, 1, 96, [0, 1, 70, 299, 300]),
        (64, 1025, 2, 1, 40, None),
    ],
)
def test_within_twice_the_error_of_the_plain_way(
    dtype: torch.dtype,
    block_size: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bounds: list[int] | None,
) -> None:
    """Forward, lse and each gradient; and every gradient has the dtype of its input."""
    rows = 1 if bounds is None else len(bounds) - 1
    index = random_index(rows, heads, seq_len, block_size, cu_seqlens=bounds)
    inputs = random_inputs(1, seq_len, heads, kv_heads, head_dim, dtype=dtype)
    options = {"cu_seqlens": as_cu_seqlens(bounds)}
    grads = {
        "grad_out": torch.randn(1, seq_len, heads, head_dim).to(dtype),
        "grad_lse": torch.randn(1, heads, seq_len).to(dtype),
    }
    wide = [tensor.double() for tensor in inputs]
    exact = run_with_gradients(lambda *qkv: oracle_attention(*qkv, index, **options), *wide, **grads)
    plain = run_with_gradients(lambda *qkv: plain_attention(*qkv, index, **options), *inputs, **grads)
    with nan_filled_empty():
        ours = run_with_gradients(lambda *qkv: sparse_attention(*qkv, index=index, **options), *inputs, **grads)
    assert ours["lse"].dtype == torch.float32
    assert {tensor.dtype for name, tensor in ours.items() if name != "lse"} == {dtype}
    rounding = gradient_rounding(*inputs, grad_out=grads["grad_out"])
    assert_all_within_budget(ours, plain, exact, rounding=rounding)


@pytest.mark.parametrize("offset", [-6e4, 2e4])
@pytest.mark.parametrize("seq_len", [1, 37])
def test_scores_far_from_zero(offset: float, seq_len: int) -> None:
    """Scores near -6e4 or 2e4 give the softmax of their differences, without overflow, underflow or NaN."""
    index = random_index(1, 2, seq_len, 8)
    query, key, value = random_inputs(1, seq_len, 2, 1, 9, dtype=torch.float32)
    query[..., 0], key[..., 0] = offset, 1.0  # one component of the product adds the offset to every score
    inputs = (query, key, value)
    grads = {"grad_out": torch.randn(1, seq_len, 2, 9), "grad_lse": torch.randn(1, 2, seq_len)}
    exact = run_with_gradients(
        lambda *qkv: oracle_attention(*qkv, index, softmax_scale=1.0), *(t.double() for t in inputs), **grads
    )
    plain = run_with_gradients(lambda *qkv: plain_attention(*qkv, index, softmax_scale=1.0), *inputs, **grads)
    ours = run_with_gradients(lambda *qkv: sparse_attention(*qkv, index=index, softmax_scale=1.0), *inputs, **grads)
    assert abs(float(exact["lse"].mean()) - offset) < 20
    rounding = gradient_rounding(*inputs, grad_out=grads["grad_out"], softmax_scale=1.0)
    assert_all_within_budget(ours, plain, exact, rounding=rounding)


def test_one_dominant_score_takes_all() -> None:
    """A score 2e5 above the others: its value is the output bit for bit, and the softmax has no slope."""
    index = VerticalSlashIndex.dense(rows=1, num_heads=1, seq_len=20, block_size=4)
    query, key = torch.zeros(1, 20, 1, 2), torch.zeros(1, 20, 1, 2)
    query[..., 0], key[:, 3, :, 0], key[:, 4:, :, 0] = 1.0, 1e5, -1e5
    value = torch.randn(1, 20, 1, 2)
    ours = run_with_gradients(
        lambda *qkv: sparse_attention(*qkv, index=index, softmax_scale=1.0),
        query,
        key,
        value,
        grad_out=torch.randn(1, 20, 1, 2),
    )
    assert torch.equal(ours["out"][:, 3:], value[:, 3:4].expand(1, 17, 1, 2))
    assert torch.equal(ours["lse"][..., 3:], torch.full((1, 1, 17), 1e5))
    assert not bool(ours["grad_query"][:, 3:].any())
    assert all(bool(tensor.isfinite().all()) for tensor in ours.values())


def test_repeats_bit_for_bit() -> None:
    index = random_index(2, 4, 130, 8)
    inputs = random_inputs(2, 130, 4, 1, 16, dtype=torch.float32)
    grad_out = torch.randn(2, 130, 4, 16)
    runs = [
        run_with_gradients(lambda *qkv: sparse_attention(*qkv, index=index), *inputs, grad_out=grad_out)
        for _ in range(2)
    ]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


MEMORY_PROGRAM = """
import resource, torch
from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.types import VerticalSlashIndex
torch.set_num_threads(1)
seq_len, heads, head_dim = 32768, 2, 16
slashes = [0, 1, 2, 100, 200, 300, 400, 500]
index = VerticalSlashIndex.from_lists([[range(0, 2048, 16)] * heads], [[slashes] * heads], seq_len=seq_len)
inputs = [torch.randn(1, seq_len, heads, head_dim, requires_grad=True) for _ in range(3)]
def run(index, inputs):
    sparse_attention(*inputs, index=index).out.sum().backward()
small = VerticalSlashIndex.dense(rows=1, num_heads=heads, seq_len=64)
run(small, [tensor.detach()[:, :64].requires_grad_() for tensor in inputs])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(index, inputs)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts KiB on Linux only")
def test_32768_tokens_take_a_few_copies_of_the_inputs() -> None:
    """Forward and backward add less than 16 input sizes and 32 MiB; scores of all against all would take 8 GiB."""
    done = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, check=True)
    input_bytes = 32768 * 2 * 16 * 4
    assert int(done.stdout) < 16 * input_bytes + (32 << 20), f"{int(done.stdout) / 2**20:.0f} MiB"
