"""The example in bfloat16 on GPUs: with the CUDA kernels it trains as with the plain backend, by the error rule."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.sources import ROOT

pytest.importorskip("megatron.core")

OPTIONS = "--device cuda --head-dim 64 --steps 100 --mtraining-dense-warmup-steps 80 --report-interval 100".split()
RUNS = {
    "kernels": ["--dtype", "bfloat16", "--mtraining-backend", "cuda"],
    "plain": ["--dtype", "bfloat16", "--mtraining-backend", "reference"],
    "float32": ["--dtype", "float32", "--mtraining-backend", "reference"],
}


def run_example(num_ranks: int, folder: Path, options: list[str]) -> Path:
    """Starts the example as a person would; returns its journal."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *torchrun, "examples/train_tiny_gpt.py", *OPTIONS, *options, "--output-dir", str(folder)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder / "journal.json"


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(1, marks=pytest.mark.gpu),
        pytest.param(2, marks=pytest.mark.multi_gpu(2)),
        pytest.param(4, marks=pytest.mark.multi_gpu(4)),
    ],
)
def test_the_kernels_train_as_the_plain_backend_does(num_ranks, tmp_path, capsys):
    from compare_runs import main

    journals = {name: str(run_example(num_ranks, tmp_path / name, options)) for name, options in RUNS.items()}
    status = main([journals["kernels"], journals["plain"], "--exact", journals["float32"]])
    assert status == 0, capsys.readouterr().out
