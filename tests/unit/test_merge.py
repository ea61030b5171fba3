"""Merging partial results: right values and right gradients in every combination of empty, far apart and garbage."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_mtraining.backends.merge import merge_partials
from megatron_mtraining.types import AttentionOutput

INF, NAN = math.inf, math.nan


def one_row(lse: float, out: float, *, dtype: torch.dtype = torch.float64) -> AttentionOutput:
    """A partial of one row and one head that requires gradients."""
    return AttentionOutput(
        torch.tensor([[[[out]]]], dtype=dtype, requires_grad=True),
        torch.tensor([[[lse]]], dtype=dtype, requires_grad=True),
    )


@pytest.mark.parametrize(
    ("lse_a", "lse_b", "share_a"),
    [
        pytest.param(0.5, -0.3, 1 / (1 + math.exp(-0.8)), id="both"),
        pytest.param(-INF, 2.0, 0.0, id="first-empty"),
        pytest.param(2.0, -INF, 1.0, id="second-empty"),
        pytest.param(-INF, -INF, None, id="both-empty"),
        pytest.param(70.0, -30.0, 1.0, id="gap-plus-100"),
        pytest.param(-30.0, 70.0, math.exp(-100), id="gap-minus-100"),
        pytest.param(5e4, 5e4 - 1, 1 / (1 + math.exp(-1)), id="huge"),
        pytest.param(-5e4, -5e4 - 1, 1 / (1 + math.exp(-1)), id="tiny"),
    ],
)
@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
def test_values_and_gradients(lse_a: float, lse_b: float, share_a: float | None, garbage: float) -> None:
    """Expected figures are written out by hand, from ``lse = log(e^a + e^b)`` and the weighted mean."""
    out_a, out_b = (garbage if lse == -INF else value for lse, value in ((lse_a, 3.0), (lse_b, -5.0)))
    a, b = one_row(lse_a, out_a), one_row(lse_b, out_b)
    merged = merge_partials(a, b)
    grads = torch.autograd.grad(
        [merged.out, merged.lse], [a.out, b.out, a.lse, b.lse], [torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)]
    )
    if share_a is None:
        expected, expected_grads = (0.0, -INF), (0.0, 0.0, 0.0, 0.0)
    else:
        share_b = 1.0 - share_a
        mean = (share_a * 3.0 if share_a else 0.0) + (share_b * -5.0 if share_b else 0.0)
        peak = max(lse_a, lse_b)
        expected = (mean, peak + math.log1p(math.exp(min(lse_a, lse_b) - peak)))
        slope = share_a * share_b * 8.0  # d out / d lse_a = share_a * share_b * (out_a - out_b)
        expected_grads = (share_a, share_b, slope + share_a, share_b - slope)
    got = [float(tensor.detach()) for tensor in (merged.out, merged.lse, *grads)]
    assert got == pytest.approx([*expected, *expected_grads], rel=1e-12, abs=1e-30)


def test_gap_of_100_keeps_the_larger_bit_for_bit_in_float32() -> None:
    a, b = one_row(70.0, 3.0, dtype=torch.float32), one_row(-30.0, 5.0, dtype=torch.float32)
    for merged in (merge_partials(a, b), merge_partials(b, a)):
        assert float(merged.out.detach()) == 3.0
        assert float(merged.lse.detach()) == 70.0


def partials_of_softmax(scores: Tensor, value: Tensor) -> AttentionOutput:
    """Attention of given ``[batch, heads, queries, keys]`` scores."""
    out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), value)
    return AttentionOutput(out, torch.logsumexp(scores, -1))


def test_merging_parts_is_attention_over_the_whole() -> None:
    scores = (torch.randn(2, 3, 7, 12, dtype=torch.float64) * 4).requires_grad_()
    value = torch.randn(2, 12, 3, 5, dtype=torch.float64, requires_grad=True)
    parts = [
        partials_of_softmax(scores[..., keys], value[:, keys]) for keys in (slice(0, 1), slice(1, 9), slice(9, 12))
    ]
    merged = merge_partials(merge_partials(parts[2], parts[0]), parts[1])
    whole = partials_of_softmax(scores, value)
    grad_out, grad_lse = torch.randn_like(whole.out), torch.randn_like(whole.lse)
    ours, exact = (
        torch.autograd.grad(list(result), [scores, value], [grad_out, grad_lse], retain_graph=True)
        for result in (merged, whole)
    )
    for got, expected in zip((*merged, *ours), (*whole, *exact), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 3, 2, 2), (1, 2, 3)) * 2]
    assert torch.autograd.gradcheck(
        lambda *t: merge_partials(AttentionOutput(*t[:2]), AttentionOutput(*t[2:])), tensors
    )


def test_low_precision_out_is_merged_in_the_precision_of_lse() -> None:
    lse = torch.randn(1, 2, 9)
    out = torch.randn(2, 1, 9, 2, 4).bfloat16()
    merged = merge_partials(AttentionOutput(out[0], lse), AttentionOutput(out[1], lse + 0.37))
    share = torch.sigmoid(torch.tensor(-0.37))
    assert merged.out.dtype == torch.bfloat16
    assert merged.lse.dtype == torch.float32
    assert torch.equal(merged.out, (out[0].float() * share + out[1].float() * (1 - share)).bfloat16())


@pytest.mark.parametrize(
    ("out_a", "out_b", "lse_a", "lse_b", "message"),
    [
        ((3, 2, 4), (3, 2, 4), (2, 3), (2, 3), r"a\.out must be of shape \[batch, seq, num_heads, head_dim\]"),
        ((1, 3, 2, 4), (1, 3, 2, 5), (1, 2, 3), (1, 2, 3), r"b\.out must be of the shape \(1, 3, 2, 4\)"),
        ((1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2), (1, 2, 3), r"a\.lse must be of shape \(1, 2, 3\)"),
        ((1, 3, 2, 4), (1, 3, 2, 4), (1, 2, 3), (1, 2), r"b\.lse must be of shape \(1, 2, 3\)"),
    ],
)
def test_refuses_shapes_that_disagree(out_a: tuple, out_b: tuple, lse_a: tuple, lse_b: tuple, message: str) -> None:
    a = AttentionOutput(torch.zeros(out_a), torch.zeros(lse_a))
    b = AttentionOutput(torch.zeros(out_b), torch.zeros(lse_b))
    with pytest.raises(ValueError, match=message):
        merge_partials(a, b)
