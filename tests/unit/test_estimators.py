"""The registries, the rows that the shipped estimators ask for, and how strategies of one's own plug in."""

from __future__ import annotations

import re

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.config import BUDGETS, ESTIMATORS, MTrainingConfig
from megatron_mtraining.selection import (
    Budget,
    Choice,
    Selection,
)

CONFIG = MTrainingConfig.algorithm_1(num_probe_rows=16, num_probe_windows=4, dense_below=0, block_size=8)


def test_the_shipped_names():
    assert ESTIMATORS.names[:2] == ("last_window", "probe_windows")
    assert BUDGETS.names[:4] == ("cost", "top_p", "fixed", "top_p_literal")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"estimator must be one of last_window, probe_windows.*, got 'lucky'\."):
        ESTIMATORS.get("lucky")
    with pytest.raises(ValueError, match=r"budget must be one of cost, top_p, .*, got 'lucky'\."):
        BUDGETS.get("lucky")


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match=r"estimator name must be new, got 'last_window'\."):
        ESTIMATORS.register("last_window", ESTIMATORS.get("probe_windows"))
    with pytest.raises(ValueError, match=r"budget name must be new, got 'cost'\."):
        BUDGETS.register("cost", BUDGETS.get("top_p"))


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (37, 1000), (5, 22), (5, 21), (0, 3), (9, 10)])
def test_last_window_rows(start, stop):
    rows = ESTIMATORS.get("last_window").probe_rows(start, stop, CONFIG)
    assert rows == tuple(range(max(start, stop - 16), stop))


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (37, 1000), (5, 22), (5, 21), (0, 3), (9, 10)])
def test_probe_windows_rows(start, stop):
    rows = ESTIMATORS.get("probe_windows").probe_rows(start, stop, CONFIG)
    assert list(rows) == sorted(set(rows)) and rows[0] >= start and rows[-1] == stop - 1
    assert len(rows) == min(16, stop - start)


def test_probe_windows_are_evenly_spaced():
    assert ESTIMATORS.get("probe_windows").probe_rows(100, 500, CONFIG) == tuple(
        end - back for end in (200, 300, 400, 500) for back in (4, 3, 2, 1)
    )


class LastRow:
    """Looks at the last row."""

    reads = ()

    def probe_rows(self, start, stop, config):
        return (stop - 1,)


class NoRows(LastRow):
    """Looks at nothing."""

    def probe_rows(self, start, stop, config):
        return ()


class Descending(LastRow):
    """Looks at two rows in the wrong order."""

    def probe_rows(self, start, stop, config):
        return (stop - 1, stop - 2)


class FirstColumns(Budget):
    """Selects the first columns and the largest distance, whatever their mass."""

    def choose(self, mass, config):
        lists, _, blocks, _ = mass.mass.shape
        return every_list(lists, (4, 5), (blocks - 1,))


class ChoosesWhatIsThere(Budget):
    """Chooses a sink, one column twice, a local distance, and one distance twice."""

    def choose(self, mass, config):
        return every_list(mass.mass.shape[0], (9, 1, 9, 0, 20), (5, 1, 5, 0))


def every_list(count, columns, distances) -> Choice:
    """The same columns and distances for so many lists."""

    def chosen(items):
        entries = torch.tensor(items).expand(count, -1)
        return Selection(entries, torch.ones_like(entries, dtype=torch.bool))

    return Choice(chosen(columns), chosen(distances))


@pytest.fixture
def select_with(monkeypatch):
    """Selection by an estimator and a budget that are registered for this test only."""
    for registry in (BUDGETS, ESTIMATORS):
        monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))

    def with_strategies(estimator=None, budget=None, **changes):
        ESTIMATORS.register("own", estimator or LastRow())
        BUDGETS.register("own", budget or FirstColumns())
        fields = {"dense_below": 0, "block_size": 8, "sink_tokens": 1, "local_blocks": 1, "max_slash": 1} | changes
        config = MTrainingConfig(estimator="own", budget="own", **fields)
        return select(torch.randn(1, 80, 2, 4), torch.randn(1, 80, 2, 4), config)

    return with_strategies


@pytest.mark.parametrize(("estimator", "got"), [(NoRows(), "()"), (Descending(), "(79, 78)")])
def test_rows_that_cannot_be_looked_at_are_refused(select_with, estimator, got):
    sentence = rf"estimator\.probe_rows must be ascending in \[0, 80\), at least one, got {re.escape(got)}\."
    with pytest.raises(ValueError, match=sentence):
        select_with(estimator)


def test_more_than_the_caps_is_refused(select_with):
    sentence = r"choice\.vertical\.items must be at most 1 wide, the cap of budget own, got 2\."
    with pytest.raises(ValueError, match=sentence):
        select_with(max_vertical=1)


def test_what_is_selected_anyway_is_in_a_list_once(select_with):
    index = select_with(budget=ChoosesWhatIsThere(), sink_tokens=2, local_blocks=2, max_vertical=5, max_slash=4)
    for head in (0, 1):
        assert index.vertical[0, head, : index.num_vertical[0, head]].tolist() == [0, 1, 9, 20]
        assert index.slash[0, head, : index.num_slash[0, head]].tolist() == [0, 1, 5]
        assert (index.vertical[0, head, index.num_vertical[0, head] :] == 80).all()
        assert (index.slash[0, head, index.num_slash[0, head] :] == 10).all()


def test_a_budget_of_ones_own(select_with):
    index = select_with()
    assert index.vertical[0, 1, : index.num_vertical[0, 1]].tolist() == [0, 4, 5]
    assert index.slash[0, 1, : index.num_slash[0, 1]].tolist() == [0, 9]
