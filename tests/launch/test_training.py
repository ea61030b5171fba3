"""A script over ``megatron.training`` from start to end: unchosen, dense, sparse, resumed, then in stock Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mtraining.megatron.compat import has_module

from .jobs import DENSE, SCRIPT, SPARSE, Job, train, without_split

pytestmark = pytest.mark.skipif(not has_module("megatron.training"), reason="no megatron.training in this wheel")

WARMUP = ("--mtraining-dense-warmup-steps", 3)
"""Ends one step after the checkpoint, so that a resumed run has to count on."""

CHECKPOINTS = ("--save-interval", 2, "--ckpt-format", "torch_dist", "--use-dist-ckpt")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The script alone."""
    return train(launcher=(), folder=tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """Four steps on one rank with a checkpoint after the second and evaluations, and the folder of the checkpoints."""
    folder = tmp_path_factory.mktemp("sparse")
    evaluations = ("--eval-interval", 2, "--eval-iters", 1)
    return train(
        *SPARSE, *WARMUP, *CHECKPOINTS, *evaluations, "--save", folder / "saved", folder=folder
    ), folder / "saved"


def assert_equal(losses: dict[int, float], expected: dict[int, float]) -> None:
    assert losses.keys() == expected.keys()
    assert max(abs(losses[step] - expected[step]) for step in expected) < 1e-5


def test_unchosen_nothing_changes(stock: Job, tmp_path: Path):
    job = train(folder=tmp_path)
    assert job.losses == stock.losses
    assert job.said == ["nothing is replaced: --attention-backend is auto, not mtraining."]


def test_where_everything_is_kept_it_is_dense_attention(stock: Job, tmp_path: Path):
    """Flags of ablations are taken together: any layout, schedule and sharing keeps everything."""
    ablations = "--mtraining-layout node_striped --mtraining-schedule flat --mtraining-index-sharing kv_group"
    job = train(*DENSE, *ablations.split(), cp_size=2, folder=tmp_path, with_torchrun=True)
    assert len(stock.losses) == 4
    assert_equal(job.losses, stock.losses)
    assert "1 core_attention of GPTModel's transformer_layer_spec replaced." in job.said


def test_steps_are_counted_and_the_evaluation_runs(stock: Job, sparse: tuple[Job, Path]):
    job, _ = sparse
    assert_equal({step: job.losses[step] for step in (1, 2, 3)}, {step: stock.losses[step] for step in (1, 2, 3)})
    assert abs(job.losses[4] - stock.losses[4]) > 3e-5, "sparse after the warm-up"
    assert job.output.count("validation loss at iteration") >= 2


def test_a_run_resumes_on_other_ranks_in_another_layout(sparse: tuple[Job, Path], tmp_path: Path):
    job, saved = sparse
    flags = (*SPARSE, *WARMUP, "--mtraining-layout", "zigzag", "--load", saved, "--ckpt-step", 2)
    resumed = train(*flags, "--exit-interval", 4, cp_size=2, folder=tmp_path)
    assert_equal(resumed.losses, {step: job.losses[step] for step in (3, 4)})


def test_stock_megatron_reads_the_checkpoint(stock: Job, sparse: tuple[Job, Path], tmp_path: Path):
    resumed = train("--load", sparse[1], "--ckpt-step", 2, launcher=(), folder=tmp_path)
    assert_equal(resumed.losses, {step: stock.losses[step] for step in (3, 4)})


@pytest.mark.parametrize("layout", ["striped", pytest.param("zigzag", marks=pytest.mark.extended)])
def test_a_script_that_splits_no_batch_stops_before_its_first_loss(layout: str, tmp_path: Path):
    with pytest.raises(AssertionError) as failure:
        train(*SPARSE, "--mtraining-layout", layout, cp_size=2, script=without_split(SCRIPT, tmp_path), folder=tmp_path)
    assert "must be 96, of --seq-length 192, got 192: a batch that nobody split." in str(failure.value)
    assert "lm loss" not in str(failure.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--mtraining-num-probe-rows", 0), "num_probe_rows must be an integer of at least 1, got 0."),
        (("--mtraining-layout", "diagonal"), "argument --mtraining-layout: invalid choice: 'diagonal'"),
        (("--attention-backend", "mtrainning"), "invalid choice: 'mtrainning' (choose from flash, fused, unfused"),
        (
            ("--hierarchical-context-parallel-sizes", 2, 2),
            "--hierarchical-context-parallel-sizes must be sizes whose product is --context-parallel-size, got 2 2",
        ),
        (("--hidden-size", 33), "--hidden-size and --num-attention-heads must be what Megatron-LM checks in arguments"),
    ],
)
def test_wrong_values_end_with_a_sentence(flags: tuple, sentence: str, tmp_path: Path):
    with pytest.raises(AssertionError) as failure:
        train(*SPARSE, *flags, folder=tmp_path)
    assert sentence in str(failure.value)
    assert str(failure.value).startswith("status 2: ")
    assert "Traceback" not in str(failure.value)
