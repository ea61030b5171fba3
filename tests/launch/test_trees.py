"""Unmodified Megatron-LM trees: their own pretrain_gpt.py, named by MEGATRON_LM (several, as in PATH)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .jobs import DENSE, SPARSE, Job, train, without_split

TREES = [Path(part) for part in os.environ.get("MEGATRON_LM", "").split(os.pathsep) if part]

pytestmark = pytest.mark.skipif(not TREES, reason="MEGATRON_LM names no Megatron-LM tree")


@pytest.fixture(scope="module", params=TREES, ids=lambda tree: tree.name)
def tree(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def stock(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tree, tmp_path_factory.mktemp("stock"), launcher=())


@pytest.fixture(scope="module")
def sparse(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tree, tmp_path_factory.mktemp("sparse"), *SPARSE)


def run(tree: Path, folder: Path, *flags: object, **options: object) -> Job:
    return train(*flags, script=tree / "pretrain_gpt.py", tree=tree, folder=folder, **options)


def largest_difference(job: Job, expected: Job) -> float:
    assert job.losses.keys() == expected.losses.keys() == {1, 2, 3, 4}
    return max(abs(job.losses[step] - expected.losses[step]) for step in expected.losses)


@pytest.mark.parametrize(("cp_size", "layout"), [(1, "striped"), (2, "zigzag"), (4, "striped")])
def test_dense_everywhere_is_the_stock_run(tree, stock, tmp_path, cp_size, layout):
    job = run(tree, tmp_path, *DENSE, "--mtraining-layout", layout, cp_size=cp_size)
    assert largest_difference(job, stock) < 1e-5


@pytest.mark.parametrize(("cp_size", "layout"), [(2, "zigzag"), (4, "striped")])
def test_sparse_is_the_same_on_every_number_of_ranks(tree, sparse, tmp_path, cp_size, layout):
    job = run(tree, tmp_path, *SPARSE, "--mtraining-layout", layout, cp_size=cp_size)
    assert largest_difference(job, sparse) < 1e-5


def test_a_script_that_splits_no_batch_stops_before_its_first_loss(tree, tmp_path):
    with pytest.raises(AssertionError) as failure:
        train(*SPARSE, cp_size=2, script=without_split(tree / "pretrain_gpt.py", tmp_path), tree=tree, folder=tmp_path)
    assert "must be 96, of --seq-length 192, got 192: a batch that nobody split." in str(failure.value)
    assert "lm loss" not in str(failure.value)


def test_unchosen_nothing_changes(tree, stock, tmp_path):
    assert run(tree, tmp_path).losses == stock.losses
