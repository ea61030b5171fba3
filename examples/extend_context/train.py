"""``train``: unchanged pretrain_gpt.py under the launcher, and the loss on held-out documents before and after."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

from megatron_mtraining.errors import invalid

from .held_out import Losses, losses_in_process
from .launch_config import checkpoint_folder, devices, launch_config
from .progress import Progress
from .settings import Settings
from .tokens import write_atomically

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?lm loss: (\S+)")
REPOSITORY = Path(__file__).resolve().parents[2]


def train(settings: Settings) -> str:
    """Run the training steps that are missing, evaluate before and after, and return a sentence about it.

    Raises:
        ValueError: nothing prepared, no Megatron-LM tree, or a run that failed.
    """
    from .bridge import copy_run_config, latest_iteration

    folder = settings.run_folder
    script = Path(settings.train.megatron_lm, "pretrain_gpt.py")
    if not script.is_file():
        remedy = "Clone https://github.com/NVIDIA/Megatron-LM and name the folder."
        raise invalid("train.megatron_lm", "the folder of a Megatron-LM tree", f"no {script}", remedy)
    machine = devices()
    config = launch_config(settings, **machine)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = checkpoint_folder(settings)
    done = latest_iteration(checkpoints)
    if done is None or int(done.name.removeprefix("iter_")) < settings.train.steps:
        write_launch_config(folder / "launch.yaml", config)
        run_script(settings, script, folder / "launch.yaml", has_gpu=machine["has_gpu"])
        done = latest_iteration(checkpoints)
    for iteration in checkpoints.glob("iter_*"):
        copy_run_config(settings.megatron_folder, iteration)
    evaluated = losses_in_process(settings, held_out_files(settings, done))
    if evaluated is not None:
        print(table(*evaluated))
    return sentence(settings, done, evaluated)


def held_out_files(settings: Settings, done: Path) -> dict[Path, Path]:
    """Return checkpoints before and after training by the files of their held-out losses."""
    folder = settings.run_folder
    trained = folder / f"held_out_{done.name}.json"
    return {folder / "held_out_before.json": settings.megatron_folder, trained: checkpoint_folder(settings)}


def write_launch_config(path: Path, config: dict) -> None:
    """Write a launch config, the form in which the launcher reads flags and environment."""
    import yaml

    write_atomically(path, yaml.safe_dump(config, sort_keys=False))


def command(settings: Settings, script: Path, config: Path, *, has_gpu: bool) -> list[str]:
    """Return the command line of the training run."""
    ranks = str(settings.train.ranks)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    on_cpu = [] if has_gpu else ["-m", "megatron_mtraining.testing.megatron_on_cpu"]
    return [*torchrun, *on_cpu, "-m", "megatron_mtraining", "--config", str(config), str(script)]


def run_script(settings: Settings, script: Path, config: Path, *, has_gpu: bool) -> None:
    """Run the script to its end; its output goes to ``log.txt`` beside the launch config.

    Raises:
        ValueError: the run failed; the last lines of its log say why.
    """
    log = config.with_name("log.txt")
    paths = [str(script.parent.resolve()), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Megatron compiles its data sets' helper on the first run, by the first python3 on PATH.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.train.ranks)))
    progress = Progress(f"train: {config.parent.name}", settings.train.steps, "steps")
    last: deque[str] = deque(maxlen=15)
    with log.open("a") as file:
        process = subprocess.Popen(
            command(settings, script, config, has_gpu=has_gpu),
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                last.append(line)
                if found := _ITERATION.search(line):
                    progress.update(int(found[1]), f"loss {float(found[2]):.4f}")
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.terminate()
            status = process.wait()
    progress.close()
    if status:
        raise invalid("the training run", f"successful, see {log}", f"status {status}:\n{''.join(last)}")


def table(before: Losses, after: Losses) -> str:
    """Return a table of held-out losses by position."""
    lines = [f"{'positions':>17} {'before':>8} {'after':>8}"]
    for (begin, end, loss), (*_, trained) in zip(before.by_position, after.by_position, strict=True):
        lines.append(f"{begin:>8}-{end:<8} {loss:>8.4f} {trained:>8.4f}")
    return "\n".join(lines)


def sentence(settings: Settings, done: Path, evaluated: list[Losses] | None) -> str:
    """Return the sentence that ``train`` ends with."""
    if evaluated is None:
        return f"checkpoint in {done}; no documents were held out"
    before, after = evaluated
    held = f"{after.documents} held-out documents of {after.tokens} tokens"
    trained = f"held-out loss {before.mean:.4f} -> {after.mean:.4f} nats a token ({settings.train.attention})"
    return f"checkpoint in {done}, {trained}, {held}"
