"""The budget's edges on masses that are exact in binary, and the order that ties take."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mtraining.selection.budget import exclusive_sum, fold_sum, largest_first, select_runs, select_top_p
from tests.draws import examples

DTYPES = [torch.float32, torch.float64]


def chosen(mass, *, top_p, at_most=100, dtype=torch.float32) -> list[int]:
    """Positions that are selected from one lane, in order of mass."""
    selection = select_top_p(torch.tensor([mass], dtype=dtype), top_p=top_p, at_most=at_most)
    return selection.items[0][selection.chosen[0]].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_crossing_item_is_in_and_nothing_after_it(dtype):
    mass = [0.5, 0.25, 0.125, 0.125]
    assert chosen(mass, top_p=0.4, dtype=dtype) == [0]
    assert chosen(mass, top_p=0.5, dtype=dtype) == [0]
    assert chosen(mass, top_p=0.51, dtype=dtype) == [0, 1]
    assert chosen(mass, top_p=0.75, dtype=dtype) == [0, 1]
    assert chosen(mass, top_p=1e-30, dtype=dtype) == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_budget_that_is_exactly_full_drops_nothing(dtype):
    assert chosen([1.0, 1.0, 1.0, 1.0], top_p=0.75, at_most=3, dtype=dtype) == [0, 1, 2]
    assert chosen([1.0, 1.0, 1.0, 1.0], top_p=0.75, at_most=4, dtype=dtype) == [0, 1, 2]
    assert chosen([1.0, 1.0, 1.0, 1.0], top_p=0.75, at_most=2, dtype=dtype) == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_the_mass_is_every_item_that_has_some(dtype):
    """Masses whose sum rounds: a running sum that meets the total early would drop the smallest."""
    mass = [1.0, 0.0, 1e-30, 0.1, 0.0, 1e-12]
    assert chosen(mass, top_p=1.0, dtype=dtype) == [0, 3, 5, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_no_mass_or_no_room_selects_nothing(dtype, top_p):
    assert chosen([0.0, 0.0], top_p=top_p, dtype=dtype) == []
    assert chosen([1.0, 2.0], top_p=top_p, at_most=0, dtype=dtype) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5, 999, 1000])
def test_ties_go_to_the_lower_position(dtype, count):
    mass = torch.randint(0, 4, (7, 1000)).to(dtype)
    values, items = largest_first(mass, count)
    for lane in range(7):
        expected = sorted(range(1000), key=lambda item, lane=lane: (-float(mass[lane, item]), item))[:count]
        assert items[lane].tolist() == expected
    assert torch.equal(values, mass.gather(1, items))


def test_the_smallest_float_is_told_from_zero():
    tiny = torch.tensor([[0.0, 1e-45, 0.0]])
    values, items = largest_first(tiny, 3)
    assert items.tolist() == [[1, 0, 2]]
    assert torch.equal(values[0], tiny[0, [1, 0, 2]])


@examples(100)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=40),
    st.sampled_from([2**-20, 0.25, 0.5, 0.75, 1.0]),
    st.integers(0, 41),
)
def test_smallest_sufficient_set(units, top_p, at_most):
    """Integer masses make every sum exact; the rule is then a sentence about sets."""
    taken = chosen([float(unit) for unit in units], top_p=top_p, at_most=at_most)
    mass = [units[item] for item in taken]
    assert mass == sorted(mass, reverse=True) and 0 not in mass and len(taken) <= at_most
    left = [unit for item, unit in enumerate(units) if item not in taken]
    assert not mass or max(left, default=0) <= mass[-1]
    if sum(mass) < top_p * sum(units):
        assert len(taken) == min(at_most, sum(unit > 0 for unit in units))
    elif top_p < 1.0 and mass:
        assert sum(mass[:-1]) < top_p * sum(units)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100])
def test_exclusive_sum(size):
    values = torch.randint(0, 1000, (3, size)).double()
    assert torch.equal(exclusive_sum(values), values.cumsum(-1) - values)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 63, 64])
def test_equal_inputs_fold_to_equal_sums(size):
    values = torch.rand(size, 1)
    folded = fold_sum(values.expand(size, 1013).contiguous(), dim=0)
    assert torch.equal(folded, folded[:1].expand(1013))
    assert math.isclose(folded[0].item(), math.fsum(values.flatten().tolist()), rel_tol=1e-6)


@examples(60)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=40),
    st.integers(0, 12),
    st.integers(1, 9),
    st.sampled_from([2**-20, 0.5, 0.75, 1.0]),
    st.integers(0, 41),
)
def test_runs_are_the_items_of_their_sums(units, first, run_length, top_p, at_most):
    """Runs are chosen as items of their summed mass would be, none is cut, and the cap holds for what they have."""
    mass = torch.tensor([units], dtype=torch.float32)
    selection = select_runs(mass, first=first, run_length=run_length, top_p=top_p, at_most=at_most)
    taken = selection.items[0][selection.chosen[0]].tolist()
    runs = [units[at : at + run_length] for at in range(first, len(units), run_length)]
    expected = chosen([float(sum(run)) for run in runs], top_p=top_p, at_most=at_most // run_length) if runs else []
    assert taken == [first + run * run_length + i for run in expected for i in range(len(runs[run]))]
    assert len(taken) <= at_most and selection.items.shape[1] <= at_most
    if run_length == 1:
        beside = [0.0] * min(first, len(units)) + [float(unit) for unit in units[first:]]
        assert taken == chosen(beside, top_p=top_p, at_most=at_most)
