"""The example, small: it runs, its losses do not depend on the ranks, its judgement and its picture are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.testing.oracle import allowed_mask
from tests.programs import ROOT, TIMEOUT_S, run_ranks

SMALL = (
    "--steps 12 --mtraining-dense-warmup-steps 6 --warmup-seq-len 128 --seq-len 512 --report-interval 6 "
    "--validation-sequences 1 --hidden-size 64 --ffn-hidden-size 128 --mtraining-block-size 16 "
    "--mtraining-num-probe-rows 16 --mtraining-num-probe-windows 8 "
    "--mtraining-sink-tokens 4 --mtraining-local-blocks 2 --mtraining-max-density 0.2 "
    "--device cpu"
).split()


def command_of_example(folder: Path, *options: str) -> list[str]:
    return ["examples/train_tiny_gpt.py", *SMALL, "--output-dir", str(folder), *options]


def environment_of_example() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def run_on_one_rank(folder: Path, *options: str) -> None:
    run = run_ranks(1, *command_of_example(folder, *options), environment=environment_of_example())
    assert run.status == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run on two ranks, an outer ring of two nodes of one rank each, started as a person would."""
    folder = tmp_path_factory.mktemp("two_ranks")
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    example = command_of_example(folder, "--inner-size", "1", "--dump-qk", str(folder / "qk.pt"))
    pipes = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
    return subprocess.run([*torchrun, *example], cwd=ROOT, env=environment_of_example(), **pipes), folder


def journal_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "journal.json").read_text())


def test_a_run_passes_and_says_so(two_ranks):
    run, folder = two_ranks
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "PASSED"
    assert [line.split()[1] for line in run.stdout.splitlines() if line.startswith("step ")] == ["6", "12"]
    assert len(journal_of(folder)["losses"]) == 12


def test_it_draws_three_pictures(two_ranks):
    _, folder = two_ranks
    for name in ("losses.png", "selected_set.png", "work.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_it_dumps_the_whole_query_and_key(two_ranks):
    _, folder = two_ranks
    saved = torch.load(folder / "qk.pt", weights_only=True)
    assert saved["query"].shape == (1, 512, 4, 16)
    assert saved["key"].shape == (1, 512, 2, 16)
    assert saved["softmax_scale"] == 0.25


def test_losses_do_not_depend_on_the_number_of_ranks(two_ranks, tmp_path):
    _, folder = two_ranks
    run_on_one_rank(tmp_path)
    expected, got = (torch.tensor(journal_of(where)["losses"]) for where in (tmp_path, folder))
    # float32 sums in another order, carried through twelve steps of Adam.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("drift", "status"), [(0.0, 0), (2e-4, 0), (2e-2, 1)])
def test_runs_are_compared_by_phase(tmp_path, capsys, drift, status):
    from compare_runs import main

    journals = [tmp_path / name for name in ("a.json", "b.json")]
    for journal, factor in zip(journals, (1.0, 1.0 + drift), strict=True):
        final = {"sparse_loss": 2.0, "dense_loss": 2.0}
        journal.write_text(json.dumps({"dense_steps": 2, "losses": [5.0, 4.0, 3.0, 2.0 * factor], "final": final}))
    assert main([str(path) for path in journals]) == status
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[-1] == "0.0e+00" and float(shown[1].split()[-1]) == pytest.approx(drift, rel=0.1)


@pytest.mark.parametrize(("error", "status"), [(0.0, 0), (1.9e-2, 0), (2.3e-2, 1), (float("nan"), 1)])
def test_a_run_in_low_precision_may_be_twice_as_far_from_float32(tmp_path, capsys, error, status):
    from compare_runs import main

    exact, plain = [4.0, 3.0, 2.0], [4.0 * 1.01, 3.0, 2.0 * 0.99]
    paths = [tmp_path / name for name in ("kernels.json", "plain.json", "float32.json")]
    for path, losses in zip(paths, ([4.0, 3.0, 2.0 * (1 + error)], plain, exact), strict=True):
        final = {"sparse_loss": 2.0, "dense_loss": 2.0}
        path.write_text(json.dumps({"dense_steps": 1, "losses": losses, "final": final}))
    assert main([str(path) for path in paths[:2]] + ["--exact", str(paths[2])]) == status
    assert capsys.readouterr().out.splitlines()[1].startswith("sparse steps")


def test_it_trains_in_bfloat16_with_wider_heads(tmp_path):
    """Megatron's mixed precision, on the plain backend; its losses are float32's to bfloat16's rounding."""
    folders = {dtype: tmp_path / dtype for dtype in ("float32", "bfloat16")}
    for dtype, folder in folders.items():
        run_on_one_rank(folder, "--head-dim", "64", "--dtype", dtype, "--dump-qk", str(folder / "qk.pt"))
        saved = torch.load(folder / "qk.pt", weights_only=True)
        assert saved["query"].shape == (1, 512, 4, 64)
        assert saved["query"].dtype == getattr(torch, dtype)
    exact, low = (torch.tensor(journal_of(folder)["losses"]) for folder in folders.values())
    assert not torch.equal(exact, low)
    # Rounding weights, activations and logits to bfloat16 moves a mean loss by less than one rounding of its own.
    torch.testing.assert_close(low, exact, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


@pytest.mark.parametrize(
    ("losses", "sparse", "density", "sentence"),
    [
        ([5.0, 2.0], 2.0, 0.2, ""),
        ([5.0, 4.9], 2.0, 0.2, "The training loss must fall by 10%, got 5.000 to 4.900."),
        ([5.0, float("nan")], 2.0, 0.2, "The training loss must fall by 10%, got 5.000 to nan."),
        ([5.0, 2.0], 2.1, 0.2, "Sparse validation loss must be within 2% of dense, got 2.1000 and 2.0000."),
        ([5.0, 2.0], 2.0, 0.3, "The kept share of the causal pairs must be at most 25%, got 30.0%."),
    ],
)
def test_the_verdict_names_what_is_wrong(losses, sparse, density, sentence):
    from tiny_gpt.journal import Comparison, Journal
    from tiny_gpt.report import verdict

    final = Comparison(sparse_loss=sparse, dense_loss=2.0, density=density, recall=0.9)
    assert verdict(Journal(dense_steps=0, losses=losses, final=final)).startswith(sentence)
    assert bool(verdict(Journal(dense_steps=0, losses=losses, final=final))) == bool(sentence)


def test_the_picture_shows_exactly_the_kept_pairs():
    from tiny_gpt.plots import LEFT_OUT, NOT_CAUSAL, selected_set_picture

    vertical, slash = [0, 1, 9, 30], [0, 1, 3]
    index = VerticalSlashIndex.from_lists([[vertical]], [[slash]], seq_len=48, block_size=8)
    picture = selected_set_picture(
        torch.tensor(vertical), torch.tensor(slash), seq_len=48, block_size=8, sink_tokens=2, local_blocks=2
    )
    kept = (picture != LEFT_OUT) & (picture != NOT_CAUSAL)
    assert torch.equal(kept, allowed_mask(index, seq_len=48)[0, 0])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--steps 0", "steps must be at least 1, got 0."),
        ("--report-interval 0", "report_interval must be at least 1, got 0."),
        ("--seq-len 4097", "seq_len must be a multiple of 256 for the striped layout over 4 ranks, got 4097."),
        ("--warmup-seq-len 100", "seq_len must be a multiple of 256 for the striped layout over 4 ranks, got 100."),
        ("--inner-size 3", "inner_size must be a divisor of the 4 ranks, got 3."),
        ("--num-heads 3", "num_heads must be a multiple of num_kv_heads 2, got 3."),
        ("--num-heads 6", "num_heads must be a divisor of hidden_size 128, got 6. Give --head-dim, or another number"),
        ("--head-dim 33", "head_dim must be even and at least 2, got 33."),
        (
            "--head-dim 64 --mtraining-backend cuda",
            "dtype must be bfloat16 with --mtraining-backend cuda, got float32.",
        ),
        (
            "--dtype bfloat16 --mtraining-backend cuda",
            "head_dim must be one of 64, 96, 128 with --mtraining-backend cuda, got 32. Give --head-dim 64.",
        ),
        (
            "--dtype bfloat16 --head-dim 64 --mtraining-backend cuda --mtraining-block-size 32",
            "block_size must be 64 with --mtraining-backend cuda, got 32. Give --mtraining-block-size 64.",
        ),
        ("--estimator lucky", "estimator must be one of last_window, probe_windows, got 'lucky'."),
        ("--mtraining-pattern moba", "pattern must be vertical_slash or dense in this example, which counts and draws"),
        ("--mtraining-max-slash -1", "max_slash must be an integer of at least 0, got -1."),
    ],
)
def test_flags_are_refused_before_the_first_step(monkeypatch, capsys, flags, sentence):
    from tiny_gpt.options import parse_options

    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        parse_options(flags.split())
    assert sentence in capsys.readouterr().err


def test_a_backend_that_cannot_run_here_is_refused_before_a_model_is_built():
    from megatron_mtraining.megatron import config_from_args
    from tiny_gpt.model import check_backend
    from tiny_gpt.options import parse_options

    options = parse_options("--dtype bfloat16 --head-dim 64 --mtraining-backend cuda".split())
    with pytest.raises(SystemExit, match="--mtraining-backend must be one that runs here, got cuda. The CUDA kernels"):
        check_backend(options, config_from_args(options), torch.device("cpu"))


def test_nowhere_to_write_is_told_before_training_and_by_one_rank(monkeypatch, tmp_path):
    from tiny_gpt.options import check_output, parse_options

    (tmp_path / "file").touch()
    inside_a_file, fine = str(tmp_path / "file" / "out"), str(tmp_path / "new" / "out")
    check_output(parse_options(["--output-dir", fine, "--dump-qk", f"{fine}/qk.pt"]))
    options = parse_options(["--output-dir", inside_a_file])
    with pytest.raises(
        SystemExit, match=f"--output-dir must be where a file can be written, got {inside_a_file}: Not a"
    ):
        check_output(options)
    with pytest.raises(SystemExit, match="--dump-qk must be where a file can be written"):
        check_output(parse_options(["--output-dir", fine, "--dump-qk", f"{inside_a_file}/qk.pt"]))
    monkeypatch.setenv("RANK", "1")
    check_output(options)


def test_without_matplotlib_it_does_not_train(monkeypatch, tmp_path):
    from tiny_gpt.options import check_output, parse_options

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"matplotlib must be installed .*pip install '\.\[demo\]'"):
        check_output(parse_options(["--output-dir", str(tmp_path)]))


def test_text_is_split_by_file_and_too_little_is_refused(tmp_path):
    from tiny_gpt.data import load_text

    for number in range(16):
        (tmp_path / f"{number:02d}.txt").write_bytes(bytes([65 + number]) * 100)
    text = load_text(tmp_path, longest_sequence=50)
    assert set(text.held_out.tolist()) == {65 + 15}
    assert 65 + 15 not in text.training.tolist()
    with pytest.raises(SystemExit, match="--data must be at least 400 bytes"):
        load_text(tmp_path, longest_sequence=200)
