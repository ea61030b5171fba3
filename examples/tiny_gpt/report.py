"""What a person sees of a run: a progress bar, a line for each interval, the closing lines, the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from megatron_mtraining import MTrainingConfig

from .journal import Journal

LARGEST_GAP = 0.02
"""How far sparse and dense validation loss may lie apart, as a share of the dense one."""

LARGEST_DENSITY = 0.25
"""Most of the causal pairs that the comparison may keep."""

LEAST_FALL = 0.1
"""Share of the first loss that training must take away."""


def progress_bar(num_steps: int) -> Iterable[int]:
    """Step numbers from 0, with a bar on the first rank."""
    return tqdm(range(num_steps), unit="step", disable=dist.get_rank() != 0, dynamic_ncols=True, mininterval=0.5)


def print_line(line: str) -> None:
    """Prints above the progress bar, on the first rank."""
    if dist.get_rank() == 0:
        tqdm.write(line)


def observation_line(journal: Journal) -> str:
    """The last interval in one line."""
    seen = journal.observations[-1]
    phase = "dense " if seen.step <= journal.dense_steps else "sparse"
    recent = journal.losses[-10:]
    return (
        f"step {seen.step:4d} {phase} | loss {sum(recent) / len(recent):.3f}, held-out {seen.held_out_loss:.3f} "
        f"| kept {seen.density:6.1%}, recall {seen.recall:6.1%} "
        f"(layer {seen.worst_layer_recall:.1%}, head {seen.worst_head_recall:.1%}) "
        f"| imbalance worker {seen.worker_imbalance:.2f}, step {seen.step_imbalance:.2f} | {seen.step_ms:5.0f} ms/step"
    )


def verdict(journal: Journal) -> str:
    """Why the run is not what it should be, in one sentence; empty when it is."""
    first, last = journal.loss_change()
    final = journal.final
    if not last < (1 - LEAST_FALL) * first:
        return (
            f"The training loss must fall by {LEAST_FALL:.0%}, got {first:.3f} to {last:.3f}. Train for more --steps."
        )
    if not final.density <= LARGEST_DENSITY:
        return (
            f"The kept share of the causal pairs must be at most {LARGEST_DENSITY:.0%}, got {final.density:.1%}. "
            "Lower --mtraining-max-density or --mtraining-target-recall."
        )
    if not final.relative_gap <= LARGEST_GAP:
        return (
            f"Sparse validation loss must be within {LARGEST_GAP:.0%} of dense, got {final.sparse_loss:.4f} and "
            f"{final.dense_loss:.4f}. Raise --mtraining-max-density, or train longer."
        )
    return ""


def selection_of(config: MTrainingConfig) -> str:
    """The budget of the run, and the bound that it may not pass."""
    if config.budget != "cost":
        return f"budget {config.budget}"
    target = f"budget cost, target recall {config.target_recall:.0%}"
    if config.max_density is None:
        return target
    return f"{target}, but at most {config.max_density:.0%} of the causal pairs (--mtraining-max-density)"


def final_lines(journal: Journal, pictures: list[Path], complaint: str, config: MTrainingConfig) -> str:
    """The closing lines, the same words every time, so that a reader knows what to look for."""
    first, last = journal.loss_change()
    final = journal.final
    return "\n".join(
        [
            f"selection             {selection_of(config)}",
            f"training loss         {first:.4f} -> {last:.4f} nats per byte",
            f"validation, sparse    {final.sparse_loss:.4f} with {final.density:.1%} of the causal pairs, "
            f"{final.recall:.1%} of the attention mass",
            f"validation, dense     {final.dense_loss:.4f} on the same weights: {final.relative_gap:.2%} apart",
            *(f"picture               {path}" for path in pictures),
            f"FAILED: {complaint}" if complaint else "PASSED",
        ]
    )
