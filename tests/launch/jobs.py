"""Training scripts run to their end on ranks of the CPU, and what they print."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.programs import ROOT, TIMEOUT_S, run_ranks

SCRIPT = Path(__file__).with_name("pretrain_small.py")
ON_CPU = ("-m", "megatron_mtraining.testing.megatron_on_cpu")
LAUNCHER = ("-m", "megatron_mtraining")

MODEL = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "ffn-hidden-size": 64,
    "seq-length": 192,
    "max-position-embeddings": 192,
    "micro-batch-size": 1,
    "global-batch-size": 2,
    "train-iters": 4,
    "lr": 1e-2,
    "lr-decay-style": "constant",
    "vocab-size": 63,
    "make-vocab-size-divisible-by": 8,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "hidden-dropout": 0,
    "attention-dropout": 0,
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 1000,
    "num-workers": 0,
    "tokenizer-type": "NullTokenizer",
    "transformer-impl": "local",
    "distributed-backend": "gloo",
}
"""A small model; the switches beside it turn off what only a GPU has."""

SWITCHES = (
    "mock-data group-query-attention swiglu disable-bias-linear use-cpu-initialization no-persist-layer-norm "
    "no-gradient-accumulation-fusion no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion "
    "no-rope-fusion"
).split()

CHOSEN = ("--attention-backend", "mtraining", "--mtraining-block-size", "8")
DENSE = (*CHOSEN, "--mtraining-dense-below", "1000000")
SPARSE = (
    *CHOSEN,
    *"--mtraining-budget top_p --mtraining-estimator last_window --mtraining-num-probe-rows 16".split(),
    *"--mtraining-dense-below 0 --mtraining-sink-tokens 2 --mtraining-local-blocks 1".split(),
    *"--mtraining-max-vertical 6 --mtraining-max-slash 1".split(),
)
"""Keeps a fifth of the pairs or less."""


@dataclass(frozen=True)
class Job:
    """What became of a run."""

    status: int
    output: str

    @property
    def losses(self) -> dict[int, float]:
        """The training loss of each iteration.

        Megatron's log counts the first iteration of a run again in the second line, which is undone here.
        """
        found = re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+)", self.output)
        losses = {int(iteration): float(loss) for iteration, loss in found}
        for first, second in itertools.islice(itertools.pairwise(losses), 1):
            losses[second] = 2 * losses[second] - losses[first]
        return losses

    @property
    def said(self) -> list[str]:
        """What the launcher printed."""
        return re.findall(r"^mtraining: (.*)", self.output, re.MULTILINE)


def train(
    *flags: object,
    cp_size: int = 1,
    launcher: tuple[str, ...] = LAUNCHER,
    script: Path = SCRIPT,
    tree: Path | None = None,
    folder: Path,
    with_torchrun: bool = False,
) -> Job:
    """Trains the small model with ``flags`` beside its own and checks that it ended well.

    Args:
        flags: of the script.
        cp_size: context-parallel ranks, all there are.
        launcher: what comes before the script; nothing runs the script alone.
        script: a training script.
        tree: the Megatron-LM tree that it belongs to; default: the installed wheel.
        folder: where it runs and leaves what it writes.
        with_torchrun: whether torchrun starts the ranks, as it does for a user.
    """
    own = [word for name, value in MODEL.items() for word in (f"--{name}", value)]
    own += [f"--{name}" for name in SWITCHES] + ["--context-parallel-size", cp_size]
    command = (*ON_CPU, *launcher, script, *own, *flags)
    job = run(*command, ranks=cp_size, tree=tree, folder=folder, with_torchrun=with_torchrun)
    assert job.status == 0, f"status {job.status}: {job.output[-6000:]}"
    return job


def run(*command: object, ranks: int = 1, tree: Path | None = None, folder: Path, with_torchrun: bool = False) -> Job:
    """Python with ``command`` on so many ranks of this machine, started by torchrun or, sooner, by a server."""
    path = os.pathsep.join(str(part) for part in (tree, ROOT) if part)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it with context parallelism
    if not with_torchrun:
        ended = run_ranks(ranks, *command, folder=folder, environment=environment)
        return Job(ended.status, ended.stdout + ended.stderr)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, *map(str, command)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Job(done.returncode, done.stdout)


def without_split(script: Path, folder: Path) -> Path:
    """A copy in ``folder`` of a training script that leaves every batch whole, as one that never heard of ranks."""
    call = r"batch = get_batch_on_this_cp_rank\(\s*((?:[^(),]|\([^()]*\))*)(?:[^()]|\([^()]*\))*\)"
    text, count = re.subn(call, r"batch = \1", script.read_text())
    assert count == 1, "the script splits its batch in one place"
    copy = folder / script.name
    copy.write_text(text)
    return copy
