"""The same numbers for every number of ranks, layout, schedule, grouping of heads, batch and packing, to 1e-10."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.config import LAYOUTS, SCHEDULES
from megatron_mtraining.layout import SequenceLayout

from .cases import random_bounds, random_problem, solve_on_one_device, solve_on_ranks, worst_error

RINGS = ((1, 1), (2, 1), (2, 2), (3, 3), (3, 1), (4, 2), (5, 5), (6, 2), (6, 3), (7, 7), (8, 4))
"""(cp_size, inner_size): 6 as 2 x 3 and as 3 x 2, odd sizes, one node and one rank a node."""

HEADS = ((3, 3, 3), (4, 2, 2), (4, 1, 4))
"""(num_heads, num_kv_heads, num_lists): lists of key/value heads, which query heads share, and of query heads."""

ROWS = ("one sequence", "batch of 3", "packed documents")
CASES = [
    (kind, schedule, heads, rows, RINGS[number % len(RINGS)])
    for number, (kind, schedule, heads, rows) in enumerate(product(LAYOUTS, SCHEDULES, HEADS, ROWS))
]


def make_problem(kind, cp_size, *, heads, rows, block_size=4, num_local_blocks=2):
    """A problem whose sequence the layout divides evenly, two blocks a rank."""
    seq_len = SequenceLayout.required_multiple(kind, cp_size=cp_size, block_size=block_size)
    seq_len = max(seq_len, cp_size * num_local_blocks * block_size)
    return random_problem(
        seq_len,
        block_size=block_size,
        heads=heads[:2],
        num_lists=heads[2] if len(heads) > 2 else None,
        batch=3 if rows == "batch of 3" else 1,
        bounds=random_bounds(seq_len, 5) if rows == "packed documents" else None,
    )


def test_cases_cover_every_pair_of_choices():
    choices = (LAYOUTS, SCHEDULES, HEADS, ROWS, RINGS)
    for first, second in product(range(5), repeat=2):
        if first < second:
            met = {(case[first], case[second]) for case in CASES}
            assert met == set(product(choices[first], choices[second]))


@pytest.mark.parametrize(("kind", "schedule", "heads", "rows", "ring"), CASES)
def test_a_ring_agrees_with_the_oracle(kind, schedule, heads, rows, ring):
    cp_size, inner_size = ring
    problem = make_problem(kind, cp_size, heads=heads, rows=rows)
    got = solve_on_ranks(problem, kind, cp_size, schedule=schedule, inner_size=inner_size)
    assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_inner_and_outer_groups_the_whole_group_is_one_node(schedule):
    problem = make_problem("striped", 4, heads=(4, 2), rows="one sequence")
    got = solve_on_ranks(problem, "striped", 4, schedule=schedule, inner_size=None)
    assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


@pytest.mark.parametrize(
    ("kind", "schedule", "inner_size"),
    [
        ("node_striped", "hierarchical", 4),
        ("zigzag", "flat", 16),
        ("striped", "gather", 2),
        ("contiguous", "gather", 16),
    ],
)
def test_sixteen_ranks_agree_with_the_oracle(kind, schedule, inner_size):
    problem = make_problem(kind, 16, heads=(2, 1), rows="packed documents")
    got = solve_on_ranks(problem, kind, 16, schedule=schedule, inner_size=inner_size)
    assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


@pytest.mark.parametrize("seq_len", [1, 7, 1025])
def test_one_rank_takes_any_length(seq_len):
    problem = random_problem(seq_len, block_size=8, heads=(2, 1))
    got = solve_on_ranks(problem, "striped", 1)
    assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


@pytest.mark.parametrize("kind", LAYOUTS)
def test_slashes_at_multiples_of_the_ring_size(kind):
    """In the striped layout they all fall into the step of a rank's own keys."""
    problem = random_problem(4 * 8 * 4, block_size=4, slashes=[4, 8, 20])
    got = solve_on_ranks(problem, kind, 4, inner_size=2)
    assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_vertical", [0, 3])
def test_ring_steps_without_a_key_for_anybody(schedule, num_vertical):
    """Distance 0 alone: only a rank's own keys matter, whatever else comes by."""
    problem = random_problem(4 * 2 * 4, block_size=4, slashes=[], num_vertical=num_vertical)
    got = solve_on_ranks(problem, "striped", 4, schedule=schedule, inner_size=2)
    assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


@pytest.mark.parametrize("bounds", [[0, 7, 16], [0, 9, 17, 25, 37, 45, 57, 64], [0, 0, 1, 1, 2, 64], [0, 64]])
def test_documents_shorter_than_a_block_or_than_a_rank(bounds):
    problem = random_problem(bounds[-1], block_size=4, bounds=bounds)
    got = solve_on_ranks(problem, "zigzag", 2, inner_size=2)
    assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


@pytest.mark.parametrize(
    ("kind", "schedule", "bounds", "block_size"),
    [("zigzag", "gather", [0, 698, 704], 8), ("striped", "hierarchical", [0, 2999, 3072], 64)],
)
def test_padding_at_the_end_of_a_document_over_four_ranks(kind, schedule, bounds, block_size):
    """Lengths that nothing divides, padded to what four ranks divide: the padding is a document of its own."""
    problem = random_problem(bounds[-1], block_size=block_size, heads=(1, 1), bounds=bounds, num_vertical=40)
    got = solve_on_ranks(problem, kind, 4, schedule=schedule, inner_size=2)
    assert worst_error(got, solve_on_one_device(problem, sparse_attention)) <= 1e-10
