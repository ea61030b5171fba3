"""The registry, the rows that the shipped estimators ask for, and how an estimator of one's own plugs in."""

from __future__ import annotations

import re

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.selection import (
    Choice,
    Selection,
    estimator_names,
    estimators,
    get_estimator,
    register_estimator,
)

CONFIG = MTrainingConfig(window=16, num_probe_windows=4, dense_below=0, block_size=8)


def test_the_shipped_names():
    assert estimator_names()[:2] == ("last_window", "probe_windows")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"estimator must be one of last_window, probe_windows.*, got 'lucky'\."):
        get_estimator("lucky")


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match=r"estimator name must be new, got 'last_window'\."):
        register_estimator("last_window", get_estimator("probe_windows"))


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (37, 1000), (5, 22), (5, 21), (0, 3), (9, 10)])
def test_last_window_rows(start, stop):
    rows = get_estimator("last_window").probe_rows(start, stop, CONFIG)
    assert rows == tuple(range(max(start, stop - 16), stop))


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (37, 1000), (5, 22), (5, 21), (0, 3), (9, 10)])
def test_probe_windows_rows(start, stop):
    rows = get_estimator("probe_windows").probe_rows(start, stop, CONFIG)
    assert list(rows) == sorted(set(rows)) and rows[0] >= start and rows[-1] == stop - 1
    assert len(rows) == min(16, stop - start)


def test_probe_windows_are_evenly_spaced():
    assert get_estimator("probe_windows").probe_rows(100, 500, CONFIG) == tuple(
        end - back for end in (200, 300, 400, 500) for back in (4, 3, 2, 1)
    )


class FirstColumns:
    """Judges by the last row, and keeps the first columns and the largest distance, whatever their mass."""

    def probe_rows(self, start, stop, config):
        return (stop - 1,)

    def choose(self, mass, config):
        lanes, _, blocks, _ = mass.mass.shape
        columns = torch.arange(4, 6).expand(lanes, 2)
        distances = torch.full((lanes, 1), blocks - 1)
        return Choice(
            Selection(columns, torch.ones_like(columns, dtype=torch.bool)),
            Selection(distances, torch.ones_like(distances, dtype=torch.bool)),
        )


class ChoosesWhatIsKept(FirstColumns):
    """Chooses a sink, one column twice, a local distance, and one distance twice."""

    def choose(self, mass, config):
        def every_lane(*items):
            entries = torch.tensor(items).expand(mass.mass.shape[0], -1)
            return Selection(entries, torch.ones_like(entries, dtype=torch.bool))

        return Choice(every_lane(9, 1, 9, 0, 20), every_lane(5, 1, 5, 0))


class NoRows(FirstColumns):
    """Looks at nothing."""

    def probe_rows(self, start, stop, config):
        return ()


class Descending(FirstColumns):
    """Looks at two rows in the wrong order."""

    def probe_rows(self, start, stop, config):
        return (stop - 1, stop - 2)


@pytest.fixture
def select_with(monkeypatch):
    """Selection by an estimator that is registered for this test only."""
    monkeypatch.setattr(estimators, "_ESTIMATORS", dict(estimators._ESTIMATORS))

    def with_estimator(estimator, **changes):
        name = type(estimator).__name__
        register_estimator(name, estimator)
        fields = {"dense_below": 0, "block_size": 8, "sink_tokens": 1, "local_blocks": 1, "max_slash": 1} | changes
        return select(torch.randn(1, 80, 2, 4), torch.randn(1, 80, 2, 4), MTrainingConfig(estimator=name, **fields))

    return with_estimator


@pytest.mark.parametrize(("estimator", "got"), [(NoRows(), "()"), (Descending(), "(79, 78)")])
def test_rows_that_cannot_be_looked_at_are_refused(select_with, estimator, got):
    sentence = rf"estimator\.probe_rows must be ascending in \[0, 80\), at least one, got {re.escape(got)}\."
    with pytest.raises(ValueError, match=sentence):
        select_with(estimator)


def test_more_than_the_caps_is_refused(select_with):
    with pytest.raises(ValueError, match=r"choice\.vertical\.items must be at most max_vertical = 1 wide, got 2\."):
        select_with(FirstColumns(), max_vertical=1)


def test_what_is_kept_anyway_is_kept_once(select_with):
    index = select_with(ChoosesWhatIsKept(), sink_tokens=2, local_blocks=2, max_vertical=5, max_slash=4)
    for head in (0, 1):
        assert index.vertical[0, head, : index.num_vertical[0, head]].tolist() == [0, 1, 9, 20]
        assert index.slash[0, head, : index.num_slash[0, head]].tolist() == [0, 1, 5]
        assert (index.vertical[0, head, index.num_vertical[0, head] :] == 80).all()
        assert (index.slash[0, head, index.num_slash[0, head] :] == 10).all()


def test_an_estimator_of_ones_own(select_with):
    index = select_with(FirstColumns())
    assert index.vertical[0, 1, : index.num_vertical[0, 1]].tolist() == [0, 4, 5]
    assert index.slash[0, 1, : index.num_slash[0, 1]].tolist() == [0, 9]
