"""The registry, the rows that the shipped estimators ask for, and how an estimator of one's own plugs in."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.sparsity import (
    Choice,
    Selection,
    estimator_names,
    estimators,
    get_estimator,
    register_estimator,
    select_vertical_slash,
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


def test_an_estimator_of_ones_own(monkeypatch):
    monkeypatch.setattr(estimators, "_ESTIMATORS", dict(estimators._ESTIMATORS))
    register_estimator("first_columns", FirstColumns())
    config = MTrainingConfig(
        estimator="first_columns", dense_below=0, block_size=8, sink_tokens=1, local_blocks=1, max_slash=1
    )
    index = select_vertical_slash(torch.randn(1, 80, 2, 4), torch.randn(1, 80, 2, 4), config)
    assert index.vertical[0, 1, : index.num_vertical[0, 1]].tolist() == [0, 4, 5]
    assert index.slash[0, 1, : index.num_slash[0, 1]].tolist() == [0, 9]
