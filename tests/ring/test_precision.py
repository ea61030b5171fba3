"""Low precision: within twice the error of the plain way, whatever the ring, and no worse on more ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.config import SCHEDULES
from megatron_mtraining.testing.error_budget import assert_all_within_budget, plain_attention

from .cases import PARTS, random_bounds, random_problem, solve_on_one_device, solve_on_ranks

LOW = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("kind", "cp_size", "inner_size", "schedule"),
    [
        ("striped", 1, 1, "hierarchical"),
        ("zigzag", 4, 2, "gather"),
        ("rotated", 6, 3, "hierarchical"),
        ("contiguous", 5, 5, "flat"),
    ],
)
def test_errors_are_within_twice_those_of_the_plain_way(dtype, kind, cp_size, inner_size, schedule):
    seq_len = cp_size * 32
    problem = random_problem(seq_len, block_size=8, bounds=random_bounds(seq_len, 4), head_dim=16).to(dtype)
    exact = solve_on_one_device(problem.to(torch.float64))
    plain = solve_on_one_device(problem, plain_attention)
    ours = solve_on_ranks(problem, kind, cp_size, schedule=schedule, inner_size=inner_size)
    assert_all_within_budget(ours, plain, exact, case=f"{kind} over {cp_size}")
    assert all(ours[name].dtype == dtype for name in PARTS if name != "lse")
    assert ours["lse"].dtype == torch.float32


def dense_problem(dtype):
    """Every key is kept, so that each of up to sixteen steps adds to every row."""
    return random_problem(128, block_size=4, heads=(2, 1), slashes=range(1, 32)).to(dtype)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_of_half_precision_does_not_grow_with_the_ring(dtype, schedule):
    """Sums are float32 all the way, so all that is seen is the one rounding at the end."""
    problem = dense_problem(dtype)
    exact = solve_on_one_device(problem.to(torch.float64))

    def errors(cp_size, inner_size):
        ours = solve_on_ranks(problem, "striped", cp_size, schedule=schedule, inner_size=inner_size)
        return {name: float((ours[name].double() - exact[name]).square().mean().sqrt()) for name in PARTS}

    alone = errors(1, 1)
    for ring in ((4, 2), (16, 4)):
        grown = {name: error / alone[name] for name, error in errors(*ring).items() if name != "lse"}
        assert all(factor <= 1.02 for factor in grown.values()), grown


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_error_of_float32_stays_within_one_budget_for_every_ring(schedule):
    """The plain way's error does not know the number of ranks, so neither may ours."""
    problem = dense_problem(torch.float32)
    exact, plain = solve_on_one_device(problem.to(torch.float64)), solve_on_one_device(problem, plain_attention)
    for cp_size, inner_size in ((1, 1), (4, 2), (16, 4)):
        ours = solve_on_ranks(problem, "striped", cp_size, schedule=schedule, inner_size=inner_size)
        assert_all_within_budget(ours, plain, exact, case=f"{cp_size} ranks")


def test_the_same_call_gives_the_same_bits():
    problem = random_problem(128, block_size=4).to(torch.bfloat16)
    first, second = (solve_on_ranks(problem, "rotated", 4, inner_size=2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in PARTS)
