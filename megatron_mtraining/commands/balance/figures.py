"""Counterparts of the MTraining paper's Figures 7, 8 and 13 and of its ablation, drawn from replays.

They show what those figures are about (work of ranks and steps, imbalance over the number of ranks, what each part of
the method is worth), from counted pairs and predicted times where the paper shows measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from .replay import GATHERED, Replay

# Okabe and Ito's palette: told apart with any kind of colour vision, and in print.
COLOURS = {
    "striped": "#0072B2",
    "rotated": "#009E73",
    "zigzag": "#D55E00",
    "contiguous": "#CC79A7",
    "token_striped": "#E69F00",
    "node_striped": "#56B4E9",
}
WIDTH_INCHES = 11.0
DPI = 130


def draw_heat(replays: Sequence[Replay], path: Path) -> None:
    """Draw pairs of every rank in every step, in per cent of an even share; one panel for each layout."""
    figure, panels = plt.subplots(
        1, len(replays), figsize=(WIDTH_INCHES, 3.8), sharey=True, layout="constrained", squeeze=False
    )
    shares = [_share_of_even(replay.work.stages) for replay in replays]
    # Colours end where one panel's first step, which holds the verticals, would leave all others dark.
    highest = max(float(share[:, 1:].max() if share.shape[1] > 1 else share.max()) for share in shares)
    for axes, replay, share in zip(panels[0], replays, shares, strict=True):
        image = axes.imshow(share.numpy(), cmap="cividis", vmin=0, vmax=highest, aspect="auto", interpolation="nearest")
        worker, lockstep = replay.work.worker_imbalance, replay.work.step_imbalance
        axes.set_title(f"{replay.layout}\nworker {worker:.3f}\nlockstep {lockstep:.3f}", fontsize=9)
        axes.set(xlabel="ring step")
    panels[0][0].set_ylabel("rank")
    figure.colorbar(image, ax=panels, label="pairs (% of a step's even share)", extend="max", shrink=0.9)
    figure.suptitle(f"Work by rank and step, {_of(replays[0])}")
    _save(figure, path)


def draw_imbalance(replays: Sequence[Replay], path: Path) -> None:
    """Draw above every rank's pairs over the mean, below every step's busiest rank over the mean of that step."""
    figure, (ranks, steps) = plt.subplots(2, 1, figsize=(WIDTH_INCHES, 5.6), layout="constrained")
    width = 0.8 / len(replays)
    for column, replay in enumerate(replays):
        total = replay.work.stages.sum(1).double()
        for axes, values in ((ranks, total / total.mean()), (steps, replay.work.imbalance_of_steps)):
            at = torch.arange(len(values)) + (column - (len(replays) - 1) / 2) * width
            points = 0.8 * 72 * WIDTH_INCHES * width / len(values)
            style = {"linewidth": points, "color": COLOURS[replay.layout], "label": replay.layout}
            axes.vlines(at.tolist(), 0, values.tolist(), **style)
    ranks.set(xlabel="rank", ylabel="pairs / mean rank")
    steps.set(xlabel="ring step", ylabel="busiest / mean rank")
    for axes in (ranks, steps):
        axes.axhline(1, color="black", linewidth=0.7)
        axes.margins(x=0.01)
        axes.spines[["top", "right"]].set_visible(False)
    ranks.legend(frameon=False, ncols=len(replays), loc="lower right", bbox_to_anchor=(1, 1))
    figure.suptitle(f"Balance of ranks and of steps, {_of(replays[0])}", x=0.01, ha="left")
    _save(figure, path)


def draw_over_ranks(replays: Sequence[Replay], path: Path) -> None:
    """Draw worker and lockstep imbalance over the number of ranks; dashed with verticals inside the ring."""
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH_INCHES, 4.0), sharex=True, layout="constrained")
    lines: dict[tuple[str, str], list[Replay]] = {}
    for replay in replays:
        lines.setdefault((replay.layout, replay.verticals), []).append(replay)
    for (layout, verticals), line in lines.items():
        ranks = [replay.ring.cp_size for replay in line]
        is_gathered = verticals == GATHERED
        style = {"color": COLOURS[layout], "linestyle": "-" if is_gathered else "--", "marker": "o", "markersize": 4}
        label = layout if is_gathered else f"{layout}, verticals in ring"
        panels[0].plot(ranks, [replay.work.worker_imbalance for replay in line], label=label, **style)
        panels[1].plot(ranks, [replay.work.step_imbalance for replay in line], label=label, **style)
    panels[1].set_yscale("log", base=2)
    for axes, title in zip(panels, ("worker imbalance", "lockstep imbalance"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="ranks", title=title)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"Imbalance over the number of ranks, {replays[0].ring.kind}, nodes of {replays[0].ring.node_size}")
    _save(figure, path)


def draw_ablation(ablation: Sequence[tuple[str, Replay]], path: Path) -> None:
    """Draw predicted times of forward and backward: the mean rank's computing, its waiting, that for hosts on top."""
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 0.9 + 0.5 * len(ablation)), layout="constrained")
    for column, (_, replay) in enumerate(ablation):
        directions = replay.prediction
        compute = sum(direction.compute_ms for direction in directions)
        axes.barh(column, compute, color="#0072B2", label="computing, mean rank" if not column else None)
        waiting = sum(direction.exposed_ms for direction in directions)
        axes.barh(column, waiting, left=compute, color="#E69F00", label="waiting" if not column else None)
        lag = replay.ms - replay.gpu_ms
        axes.barh(column, lag, left=compute + waiting, color="#999999", label="launching" if not column else None)
        axes.text(replay.ms, column, f" {replay.ms:.1f}", va="center")
    axes.set_yticks(range(len(ablation)), [name for name, _ in ablation])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set(xlabel="predicted ms, one layer's attention, forward and backward")
    axes.set_title(f"What each part is worth, W {ablation[0][1].ring.cp_size}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower right", ncols=3)
    _save(figure, path)


def _share_of_even(stages: Tensor) -> Tensor:
    """Return float64 ``[cp_size, steps]``: in % of a rank's work in a step if all work were spread over all of them."""
    return 100 * stages.double() / stages.double().mean()


def _of(replay: Replay) -> str:
    return f"W {replay.ring.cp_size}, {replay.ring.kind}, verticals {replay.verticals}"


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
