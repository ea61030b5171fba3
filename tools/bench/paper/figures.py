"""Throughput over lengths, and the time of every rank and step beside its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

WIDTH_INCHES, DPI = 11.0, 130
# Okabe and Ito's palette: told apart with any kind of colour vision, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#56B4E9", "#CC79A7", "#E69F00", "#F0E442", "#000000", "#999999")


def draw_throughput(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens a second of every method over the length, a panel for each number of ranks."""
    worlds = sorted({row["ranks"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, panels = plt.subplots(
        1, len(worlds), figsize=(WIDTH_INCHES, 4.0), sharey=True, layout="constrained", squeeze=False
    )
    for axes, ranks in zip(panels[0], worlds, strict=True):
        for method, colour in zip(methods, COLOURS, strict=False):
            line = [row for row in rows if (row["ranks"], row["method"]) == (ranks, method)]
            tokens = [row["seq"] for row in line]
            rates = [row["seq"] / row["total_ms"] / 1e3 for row in line]
            axes.plot(tokens, rates, color=colour, marker="o", markersize=4, label=method)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({row["seq"] for row in rows}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel="tokens", title=f"{ranks} rank{'s' * (ranks > 1)}")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("million tokens a second")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle("One attention layer: selection, forward and backward")
    _save(figure, path)


def draw_steps(balances: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw columns of each rank's computing in each step, forward and then backward, and dots of the replay's."""
    methods = list(dict.fromkeys(each["method"] for each in balances))
    figure, panels = plt.subplots(
        2, len(methods), figsize=(WIDTH_INCHES, 5.2), sharey="row", layout="constrained", squeeze=False
    )
    for each in balances:
        axes = panels[("forward", "backward").index(each["direction"])][methods.index(each["method"])]
        num_ranks = len(each["measured_steps"])
        for rank, (measured, predicted) in enumerate(zip(each["measured_steps"], each["predicted_steps"], strict=True)):
            at = [step + 0.8 * (rank - (num_ranks - 1) / 2) / num_ranks for step in range(len(measured))]
            points = 0.6 * 72 * WIDTH_INCHES / len(methods) / len(measured) / num_ranks
            style = {"linewidth": points, "color": COLOURS[rank % len(COLOURS)], "label": f"rank {rank}"}
            axes.vlines(at, 0, measured, **style)
            axes.plot(at, predicted, color="black", linestyle="none", marker=".", label="replay" if rank == 0 else None)
        axes.set_xlabel("ring step")
        axes.set_xticks(range(len(each["measured_steps"][0])))
        axes.spines[["top", "right"]].set_visible(False)
        if each["direction"] == "forward":
            axes.set_title(each["method"], fontsize=9)
    for axes, direction in zip(panels[:, 0], ("forward", "backward"), strict=True):
        axes.set_ylabel(f"{direction} ms")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"Computing by rank and step, {balances[0]['ranks']} ranks, {balances[0]['seq']} tokens")
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
