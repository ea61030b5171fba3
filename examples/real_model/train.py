"""Train the model on long documents, once for each run, text and seed, and measure it on held-out documents.

    python -m examples.real_model train --cache CACHE --out OUT --runs dense,default --texts a --seeds 0

Weights and optimizer are float32; products bfloat16 on a GPU (autocast). AdamW without weight decay, cosine after a
short warm-up, one document a step. A finished run is ``OUT/RUN_TEXT_SEED.json`` and is not repeated; one that was ended
continues from its last checkpoint. ``--export`` writes each model as a Hugging Face folder, for ``mtraining evaluate``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from megatron_mtraining import hf
from megatron_mtraining.errors import as_integer, invalid

from .evaluate import evaluate
from .losses import autocast, token_losses
from .model import load_model, model_folder
from .runs import RUNS, config_of_run
from .texts import held_out_documents, training_documents

OBSERVED_EVERY = 10
"""Steps between those whose density is counted; their time does not count."""

GRADIENT_NORM = 1.0
BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings that all runs of a comparison share."""

    length: int
    """Tokens of a document."""

    steps: int
    learning_rate: float
    warmup_steps: int
    recompute: bool
    """True: layers are computed again in the backward pass instead of stored."""

    held_out: int
    """Held-out documents."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0: a linear warm-up, then a cosine to zero."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def main(argv: list[str]) -> None:
    """Train what is not finished."""
    options = parser().parse_args(argv)
    training = Training(
        length=as_integer("--length", options.length, least=2),
        steps=as_integer("--steps", options.steps, least=0),
        learning_rate=options.learning_rate,
        warmup_steps=min(5, options.steps),
        recompute=options.recompute,
        held_out=as_integer("--held-out", options.held_out, least=1),
    )
    runs, texts = options.runs.split(","), options.texts.split(",")
    for run in runs:
        config_of_run(run)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    folder = None if options.tiny else options.model or model_folder(options.cache)
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for text in texts:
            for run in runs:
                path = options.out / f"{run}_{text}_{seed}.json"
                exported = options.export and options.export / path.stem
                if path.exists() and (exported is None or exported.exists()):
                    print(f"{path.name}: finished before", flush=True)
                    continue
                result = train_run(run, text, seed, training, options, folder, path.with_suffix(".pt"), exported)
                write(path, {"run": run, "text": text, "seed": seed, **asdict(training), **result})


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    flags = argparse.ArgumentParser(
        prog="python -m examples.real_model train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--cache", type=Path, required=True, help="folder that fetch filled")
    flags.add_argument("--out", type=Path, required=True, help="folder of the results")
    flags.add_argument("--runs", default="dense,default", help=", ".join(RUNS))
    flags.add_argument("--texts", default="a", help="names of training texts, with commas")
    flags.add_argument("--seeds", default="0", help="of the order of documents, with commas")
    flags.add_argument("--length", type=int, default=65536, help="tokens of a document")
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--learning-rate", type=float, default=2e-4)
    flags.add_argument("--held-out", type=int, default=8, help="held-out documents to measure")
    flags.add_argument("--recompute", action="store_true", help="activation checkpointing, for GPUs below 100 GB")
    flags.add_argument("--save-every", type=int, default=50, help="steps between checkpoints; 0 for none")
    flags.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write each trained model to FOLDER/RUN_TEXT_SEED, in bfloat16"
    )
    flags.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    model = flags.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a Hugging Face folder instead of the fetched weights")
    model.add_argument("--tiny", action="store_true", help="two layers of random weights, 512 words: a dry run")
    return flags


def train_run(
    run: str,
    text: str,
    seed: int,
    training: Training,
    options: argparse.Namespace,
    folder: Path | None,
    saved: Path,
    exported: Path | None,
) -> dict[str, object]:
    """Train and measure one run.

    Args:
        run: name of its attention.
        text: name of its text.
        seed: of the order of documents.
        training: settings.
        options: flags.
        folder: weights to begin with; None for tiny random ones.
        saved: checkpoint, removed in the end.
        exported: Hugging Face folder of the trained model, to be written.
    """
    began = time.perf_counter()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = 0 if run == "untrained" else training.steps
    documents = training_documents(options.cache, text, length=training.length, count=steps, seed=seed)
    held_out = held_out_documents(options.cache, length=training.length, count=training.held_out)
    model = load_model(folder, length=training.length, device=options.device, seed=seed)
    if documents.numel() and int(documents.max()) >= model.config.vocab_size:
        raise invalid(
            "texts", f"of tokens below {model.config.vocab_size}, the words of the model", int(documents.max())
        )
    config = config_of_run(run)
    hf.configure(model, config)
    if training.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    progress = train(model, documents, training, saved=saved, save_every=options.save_every, name=saved.stem)
    if exported is not None:
        export(model, folder, exported)
    measured = evaluate(model, held_out, own=config)
    saved.unlink(missing_ok=True)
    return {
        **progress,
        **measured,
        "config": asdict(config),
        "seconds": time.perf_counter() - began,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if options.device == "cuda" else None,
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def train(
    model: nn.Module, documents: Tensor, training: Training, *, saved: Path, save_every: int, name: str
) -> dict[str, object]:
    """Take a step on each document; return losses, times and densities."""
    device = str(next(model.parameters()).device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, betas=BETAS, weight_decay=0.0, fused=device.startswith("cuda")
    )
    losses, times, densities = [], [], {}
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses, times, densities = state["losses"], state["times"], state["densities"]
        print(f"{name}: continues at step {len(losses)}", flush=True)
    clock = Clock(device)
    waiting: list[Tensor] = []
    model.train()
    for step in range(len(losses), len(documents)):
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        metrics = hf.LayerMetrics()
        is_observed = step % OBSERVED_EVERY == 0
        clock.start()
        with hf.observe(metrics) if is_observed else nullcontext():
            waiting.append(train_step(model, optimizer, documents[step].to(device, non_blocking=True)))
        clock.stop()
        if is_observed:
            densities[step] = metrics.density
        if step % OBSERVED_EVERY == 0 or step == len(documents) - 1:
            losses += torch.stack(waiting).tolist()  # the one wait for the device of these steps
            times += clock.read()
            waiting = []
            mean = statistics.fmean(densities[max(densities)].values())
            print(f"{name}: step {step} loss {losses[-1]:.4f} {times[-1]:.0f} ms, density {mean:.3f}", flush=True)
        if save_every and (step + 1) % save_every == 0 and step + 1 < len(documents):
            losses += torch.stack(waiting).tolist() if waiting else []
            times += clock.read()
            waiting = []
            save(saved, model, optimizer, losses=losses, times=times, densities=densities)
    counted = [ms for step, ms in enumerate(times) if step % OBSERVED_EVERY]
    layers = sorted({layer for each in densities.values() for layer in each})
    return {
        "loss": losses,
        "step_ms": times,
        "median_step_ms": statistics.median(counted) if counted else None,
        "density_by_layer": [statistics.fmean(each[layer] for each in densities.values()) for layer in layers],
    }


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, document: Tensor) -> Tensor:
    """Take one step on one document; return its loss on the device."""
    with autocast(str(document.device)):
        loss = token_losses(model, document).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


class Clock:
    """Time of each step; on a GPU by events, which nothing waits for until they are read."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._spans: list[tuple[object, object]] = []
        self._began: object = None

    def start(self) -> None:
        """Begin a step."""
        self._began = self._now()

    def stop(self) -> None:
        """End it."""
        self._spans.append((self._began, self._now()))

    def read(self) -> list[float]:
        """Return the milliseconds of the steps since the last reading."""
        spans, self._spans = self._spans, []
        if self._on_gpu:
            torch.cuda.synchronize()
            return [began.elapsed_time(ended) for began, ended in spans]
        return [1000 * (ended - began) for began, ended in spans]

    def _now(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress: object) -> None:
    """Write a checkpoint, whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress}, partial)
    partial.rename(path)


def export(model: nn.Module, folder: Path | None, path: Path) -> None:
    """Write a Hugging Face folder in bfloat16, with the tokenizer of ``folder``: whole or not at all.

    A sparse run's attention is saved with it; a dense one has none, so that sparse inference is that of the default.
    """
    partial = path.with_suffix(".partial")
    copied = deepcopy(model).to(torch.bfloat16)
    if copied.config.mtraining.get("pattern") == "dense":
        copied.config.mtraining = {}
    copied.save_pretrained(partial)
    if folder is not None:
        AutoTokenizer.from_pretrained(folder).save_pretrained(partial)
    partial.rename(path)


def write(path: Path, result: dict[str, object]) -> None:
    """Write a result, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.rename(path)
