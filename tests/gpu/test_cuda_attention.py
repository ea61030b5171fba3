"""Attention on the CUDA kernels against the float64 oracle: out, lse and every gradient, by the error rule."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, sparse_attention
from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    nan_filled_empty,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import oracle_attention

from .cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

FP16 = torch.float16
MANY_DOCUMENTS = (0, 9, 17, 25, 37, 45, 57, 57, 58, 130, 300, 301, 625)

CASES = [
    Case(seq_len=512, num_heads=4, num_kv_heads=2, head_dim=128),
    Case(seq_len=1025, num_heads=4, num_kv_heads=1, head_dim=64),
    Case(seq_len=449, num_heads=3, num_kv_heads=3, head_dim=96, batch=2),
    Case(seq_len=703, num_heads=6, num_kv_heads=2, head_dim=64, dtype=FP16, batch=3),
    Case(seq_len=640, num_heads=8, num_kv_heads=1, head_dim=96, dtype=FP16),
    Case(seq_len=1100, num_heads=2, num_kv_heads=2, head_dim=128, dtype=FP16),
    Case(seq_len=1100, num_heads=4, num_kv_heads=2, head_dim=128),
    Case(seq_len=833, num_heads=2, num_kv_heads=1, head_dim=64, dtype=FP16, batch=2),
    Case(seq_len=2999, num_heads=4, num_kv_heads=2, head_dim=128, max_vertical=300, max_slash=6),
    Case(seq_len=1537, num_heads=2, num_kv_heads=1, head_dim=64, max_vertical=1200, max_slash=0),
    Case(seq_len=900, num_heads=2, num_kv_heads=1, head_dim=128, max_vertical=0),
    Case(seq_len=1, num_heads=2, num_kv_heads=1, head_dim=64),
    Case(seq_len=63, num_heads=2, num_kv_heads=1, head_dim=128),
    Case(seq_len=625, num_heads=4, num_kv_heads=2, head_dim=64, bounds=MANY_DOCUMENTS),
    Case(seq_len=704, num_heads=2, num_kv_heads=1, head_dim=128, bounds=(0, 698, 704)),
    Case(seq_len=640, num_heads=2, num_kv_heads=2, head_dim=96, dtype=FP16, bounds=(0, 7, 7, 130, 320, 640)),
    Case(seq_len=1000, num_heads=2, num_kv_heads=2, head_dim=96, bounds=(0, 100, 101, 101, 640, 1000)),
    Case(seq_len=500, num_heads=2, num_kv_heads=1, head_dim=128, softmax_scale=0.9),
    Case(seq_len=1100, num_heads=8, num_kv_heads=2, head_dim=128, shares_lists=True),
    Case(seq_len=703, num_heads=6, num_kv_heads=2, head_dim=64, dtype=FP16, batch=2, shares_lists=True),
    Case(seq_len=2999, num_heads=4, num_kv_heads=1, head_dim=96, max_vertical=300, max_slash=6, shares_lists=True),
    Case(seq_len=625, num_heads=4, num_kv_heads=2, head_dim=64, bounds=MANY_DOCUMENTS, shares_lists=True),
    Case(seq_len=704, num_heads=3, num_kv_heads=1, head_dim=128, bounds=(0, 70, 698, 704), shares_lists=True),
    Case(seq_len=900, num_heads=2, num_kv_heads=1, head_dim=128, max_vertical=0, shares_lists=True),
]


def whole_index(case: Case, index: VerticalSlashIndex) -> dict[str, object]:
    return {"index": index, "softmax_scale": case.scale, "cu_seqlens": case.cu_seqlens}


def results(case: Case, index: VerticalSlashIndex, attention, dtype: torch.dtype, inputs, gradients):
    """``attention`` on inputs cast to ``dtype``."""
    run = partial(attention, **whole_index(case, index))
    grad_out, grad_lse = gradients
    return run_with_gradients(run, *(x.to(dtype) for x in inputs), grad_out=grad_out, grad_lse=grad_lse)


def check(case: Case, index: VerticalSlashIndex, inputs: tuple[torch.Tensor, ...] | None = None) -> None:
    inputs, gradients = inputs or case.inputs(), case.gradients()
    ours_on = partial(sparse_attention, config=MTrainingConfig(backend="cuda"))
    with nan_filled_empty():
        ours = results(case, index, ours_on, case.dtype, inputs, gradients)
    low = results(case, index, plain_attention, case.dtype, inputs, gradients)
    exact = results(case, index, oracle_attention, torch.float64, inputs, gradients)
    assert {name: ours[name].dtype for name in ours if name != "lse"} == dict.fromkeys(set(ours) - {"lse"}, case.dtype)
    assert_all_within_budget(ours, low, exact, case=str(case))
    # The plain way's lse is in the low dtype; ours is float32 throughout.
    torch.testing.assert_close(ours["lse"].double(), exact["lse"], rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_definition(case):
    check(case, case.index())


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_every_causal_pair(head_dim):
    case = Case(seq_len=833, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    index = VerticalSlashIndex.dense(rows=1, num_heads=4, seq_len=833, device="cuda")
    check(case, index)


@pytest.mark.parametrize("rising", [1.0, 4.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_scores_that_rise_from_tile_to_tile(head_dim, rising):
    """Keys grow towards the start of the sequence: each tile's largest weight is far above that of those before."""
    case = Case(seq_len=1100, num_heads=2, num_kv_heads=1, head_dim=head_dim, softmax_scale=0.3)
    index, (query, key, value) = case.index(), case.inputs()
    growth = torch.linspace(rising, 0.1, 1100, device="cuda").view(1, -1, 1, 1)
    check(case, index, (query.abs(), (key.abs() * growth).to(key.dtype), value))


def test_every_column_is_a_vertical():
    case = Case(seq_len=700, num_heads=2, num_kv_heads=1, head_dim=128)
    lists = [[list(range(700))] * 2], [[[0]] * 2]
    check(case, VerticalSlashIndex.from_lists(*lists, seq_len=700).to("cuda"))


def test_large_logits():
    """Scores beyond 1e4 either way: no overflow, and a row's softmax is nearly one key."""
    case = Case(seq_len=700, num_heads=2, num_kv_heads=1, head_dim=64, magnitude=60.0, softmax_scale=1.0)
    check(case, case.index())
