"""The rule itself: what it lets pass, and that it can fail."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    assert_within_budget,
    gradient_rounding,
    nan_filled_empty,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import oracle_attention

from .attention_inputs import random_index, random_inputs

EXACT = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
PLAIN = (EXACT + torch.tensor([0.01, 0.0, -0.02, 0.0])).float()


@pytest.mark.parametrize("shift", [[0.0, 0.0, 0.0, 0.0], [0.015, 0.0, 0.015, 0.0], [0.0, 0.0, 0.039, 0.0]])
def test_twice_the_plain_error_passes(shift: list[float]) -> None:
    assert_within_budget((EXACT + torch.tensor(shift)).float(), PLAIN, EXACT, name="out")


def test_one_rounding_passes_where_the_plain_way_is_exact() -> None:
    assert_within_budget(EXACT.float() * (1 + 2**-24), EXACT.float(), EXACT, name="out")


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        (
            [0.0, 0.0, 0.0, 0.05],
            r"out: largest error 5\.000e-02 is over its budget 4\.000e-02 .*worst at \(3,\): 0\.55",
        ),
        ([0.03, 0.03, 0.03, 0.03], "out: root mean square error 3.000e-02 is over its budget 2.236e-02"),
        ([float("nan"), 0.0, 0.0, 0.0], "out has 1 values that are NaN or wrongly infinite"),
        ([0.0, float("inf"), float("-inf"), 0.0], "out has 2 values that are NaN or wrongly infinite"),
    ],
)
def test_more_does_not_pass(shift: list[float], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_within_budget((EXACT + torch.tensor(shift)).float(), PLAIN, EXACT, name="out")


def test_infinities_must_stand_where_the_exact_ones_do() -> None:
    exact = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    assert_within_budget(exact.float(), exact.float(), exact, name="lse")
    for wrong in ([1.0, 0.0], [1.0, torch.inf]):
        with pytest.raises(AssertionError, match="lse has 1 values"):
            assert_within_budget(torch.tensor(wrong), exact.float(), exact, name="lse")


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"out must have shape \(4,\), got \(1, 4\)"):
        assert_within_budget(PLAIN[None], PLAIN, EXACT, name="out")


def test_a_wrong_gradient_is_named() -> None:
    index = random_index(1, 2, 21, 4)
    inputs = random_inputs(1, 21, 2, 1, 8, dtype=torch.float32)
    grad_out = torch.randn(1, 21, 2, 8)
    exact = run_with_gradients(
        lambda *qkv: oracle_attention(*qkv, index), *(t.double() for t in inputs), grad_out=grad_out
    )
    plain = run_with_gradients(lambda *qkv: plain_attention(*qkv, index), *inputs, grad_out=grad_out)
    assert_all_within_budget(plain, plain, exact)
    with pytest.raises(AssertionError, match="case 7 grad_key: largest error"):
        assert_all_within_budget(plain | {"grad_key": plain["grad_key"] * 1.001}, plain, exact, case="case 7")


def test_the_plain_way_is_the_definition() -> None:
    index = random_index(2, 4, 21, 4)
    inputs = random_inputs(2, 21, 4, 2, 8)
    for got, exact in zip(plain_attention(*inputs, index), oracle_attention(*inputs, index), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_empty_is_filled_with_nan_inside_only() -> None:
    with nan_filled_empty():
        assert bool(torch.empty(64).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_row_with_one_key_needs_the_gradient_rounding() -> None:
    """Its query gradient is 0, which the plain way hits exactly; rounding passes, more does not."""
    query, key, value = random_inputs(1, 1, 1, 1, 64, dtype=torch.float32)
    rounding = gradient_rounding(query, key, value, grad_out=torch.ones(1, 1, 1, 64))["grad_query"]
    assert 1e-8 < rounding < 1e-4
    zero = torch.zeros(4)
    assert_within_budget(zero + 0.9 * rounding, zero, zero.double(), name="grad_query", rounding=rounding)
    with pytest.raises(AssertionError, match="grad_query: largest error"):
        assert_within_budget(zero + 1.1 * rounding, zero, zero.double(), name="grad_query", rounding=rounding)
