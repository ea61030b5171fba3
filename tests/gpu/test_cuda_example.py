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


def start_example(num_ranks: int, folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Starts the example as a person would; it leaves its journal in ``folder``."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *torchrun, "examples/train_tiny_gpt.py", *OPTIONS, *options, "--output-dir", str(folder)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    folder.mkdir()
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, stdout=output, stderr=subprocess.STDOUT
        )


def journals_of(num_ranks: int, folder: Path) -> dict[str, str]:
    """Runs all of ``RUNS`` beside one another, for they share nothing, and returns their journals."""
    runs = {name: start_example(num_ranks, folder / name, options) for name, options in RUNS.items()}
    try:
        for name, run in runs.items():
            assert run.wait(timeout=300) == 0, (folder / name / "output.txt").read_text()
    finally:
        for run in runs.values():
            run.terminate()
            run.wait()
    return {name: str(folder / name / "journal.json") for name in runs}


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

    journals = journals_of(num_ranks, tmp_path)
    status = main([journals["kernels"], journals["plain"], "--exact", journals["float32"]])
    assert status == 0, capsys.readouterr().out
