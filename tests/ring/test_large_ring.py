"""Sixty-four ranks and 8192 tokens: what one device computes, to 1e-10."""

from __future__ import annotations

from megatron_mtraining.attention import sparse_attention

from .cases import random_problem, solve_on_one_device, solve_on_ranks, worst_error


def test_sixty_four_ranks_agree_with_one_device():
    problem = random_problem(8192, block_size=64, heads=(1, 1), head_dim=16, num_vertical=64, slashes=[1, 2, 17, 64])
    want = solve_on_one_device(problem, sparse_attention)
    got = solve_on_ranks(problem, "rotated", 64, schedule="hierarchical", inner_size=8)
    assert worst_error(got, want) <= 1e-10
