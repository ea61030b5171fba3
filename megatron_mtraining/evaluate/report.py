"""JSON, text tables and pictures of an evaluation."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..console import text_table
from . import needle, texts
from .benchmarks import ACCURACY
from .results import Cell, Request, cells

LEGEND = (
    "mean ± standard error over samples; accuracy from 0 to 1, losses in nats a token. density: computed pairs as a "
    "share of the causal ones, mean over layers, in the prefill; decoding is dense."
)


def write_report(
    folder: Path, requests: Sequence[Request], results: dict[str, dict[str, object]], facts: dict[str, object]
) -> str:
    """Write ``results.json``, ``table.txt`` and, with matplotlib, pictures; return the tables."""
    means = cells(requests, results)
    rows = [(request, results[request.digest]) for request in requests]
    report = facts | {
        "cells": [asdict(cell) for cell in means],
        "needle": _grouped(rows, needle.NAME, lambda sample, _: {"depth": sample.coordinates["depth"]}),
        "copy": _grouped(rows, texts.COPY, lambda sample, _: {"distance": sample.coordinates["distance"]}),
        "perplexity": _by_position(rows),
    }
    text = tables(means)
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "table.txt").write_text(text + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        _draw(folder, means, report)
    return text


def tables(means: Sequence[Cell]) -> str:
    """Return the values, a column for each inference, and below them the densities."""
    names = list(dict.fromkeys(cell.inference for cell in means))
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in means:
        rows.setdefault((cell.benchmark, str(cell.length), cell.model), {})[cell.inference] = cell
    values = [[*key, row[names[0]].metric, *(row[name].text for name in names)] for key, row in rows.items()]
    densities = [
        [*key, *("-" if row[name].density is None else f"{row[name].density:.1%}" for name in names)]
        for key, row in rows.items()
    ]
    first = ["benchmark", "length", "model"]
    blocks = [
        text_table([*first, "metric", *names], values),
        [LEGEND],
        text_table([*first, *(f"{name} density" for name in names)], densities),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


Rows = Sequence[tuple[Request, dict[str, object]]]


def _grouped(rows: Rows, benchmark: str, coordinates: Callable) -> list[dict[str, object]]:
    """Return means of a benchmark by its coordinates."""
    groups: dict[str, list[float]] = {}
    for request, result in rows:
        if request.sample.benchmark == benchmark:
            key = {"model": request.model, "inference": request.inference, "length": request.sample.length}
            key |= coordinates(request.sample, result)
            groups.setdefault(json.dumps(key), []).append(result["value"])
    return [json.loads(key) | {"mean": float(np.mean(values)), "num": len(values)} for key, values in groups.items()]


def _by_position(rows: Rows) -> list[dict[str, object]]:
    """Return losses of texts by position: means of equal parts, the first one first."""
    groups: dict[tuple[str, str, int], list[list[float]]] = {}
    for request, result in rows:
        if request.sample.benchmark == texts.PERPLEXITY:
            key = request.model, request.inference, request.sample.length
            groups.setdefault(key, []).append(result["by_position"])
    return [
        {
            "model": model,
            "inference": inference,
            "length": length,
            "perplexity": float(np.exp(np.mean(parts))),
            "by_position": np.mean(parts, axis=0).tolist(),
        }
        for (model, inference, length), parts in groups.items()
    ]


# Pictures.


def _draw(folder: Path, means: Sequence[Cell], report: dict[str, object]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    if report["needle"]:
        _draw_needle(folder / "needle.png", report["needle"])
    if report["perplexity"]:
        _draw_perplexity(folder / "perplexity.png", report["perplexity"])
    if report["copy"]:
        _draw_copy(folder / "copy.png", report["copy"])
    if any(cell.metric == ACCURACY for cell in means):
        _draw_accuracy(folder / "accuracy.png", [cell for cell in means if cell.metric == ACCURACY])


def _runs(entries: Sequence[dict[str, object]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((entry["model"], entry["inference"]) for entry in entries))


def _label(run: tuple[str, str], runs: Sequence[tuple[str, str]]) -> str:
    """Name a run: by its inference, and its model where there are several."""
    return run[1] if len({model for model, _ in runs}) == 1 else f"{run[0]}: {run[1]}"


def _lengths(entries: Sequence[dict[str, object]]) -> list[int]:
    return sorted({entry["length"] for entry in entries})


def short(length: int) -> str:
    """Return ``8K`` for 8192."""
    return f"{length >> 10}K" if length % 1024 == 0 else str(length)


def _save(figure: object, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_needle(path: Path, entries: Sequence[dict[str, object]]) -> None:
    from matplotlib import pyplot as plt

    runs, lengths = _runs(entries), _lengths(entries)
    depths = sorted({entry["depth"] for entry in entries})
    size = (2.2 + max(2.2, 0.6 * len(lengths)) * len(runs), 1.6 + 0.4 * len(depths))
    figure, axes = plt.subplots(1, len(runs), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, run in zip(axes[0], runs, strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for entry in entries:
            if (entry["model"], entry["inference"]) == run:
                grid[depths.index(entry["depth"]), lengths.index(entry["length"])] = entry["mean"]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            color = "black" if 0.15 < value < 0.85 else "white"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
        axis.set(title=_label(run, runs), xlabel="length")
        axis.set_xticks(range(len(lengths)), map(short, lengths))
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes[0][0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=axes[0].tolist(), label="accuracy")
    _save(figure, path)


def _draw_perplexity(path: Path, entries: Sequence[dict[str, object]]) -> None:
    from matplotlib import pyplot as plt

    runs, lengths = _runs(entries), _lengths(entries)
    size = (1 + 4.2 * len(lengths), 3.8)
    figure, axes = plt.subplots(1, len(lengths), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, length in zip(axes[0], lengths, strict=True):
        for entry in entries:
            if entry["length"] == length:
                run = entry["model"], entry["inference"]
                parts = entry["by_position"]
                middle = (np.arange(len(parts)) + 0.5) * length / len(parts)
                axis.plot(
                    middle, np.exp(parts), marker=".", color=f"C{runs.index(run)}", label=_label(run, runs), alpha=0.8
                )
        axis.set(title=f"{short(length)} tokens", xlabel="position")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("perplexity")
    axes[0][-1].legend(fontsize=8)
    _save(figure, path)


def _draw_copy(path: Path, entries: Sequence[dict[str, object]]) -> None:
    from matplotlib import pyplot as plt

    runs, lengths = _runs(entries), _lengths(entries)
    size = (1 + 4.2 * len(lengths), 3.8)
    figure, axes = plt.subplots(1, len(lengths), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, length in zip(axes[0], lengths, strict=True):
        for i, run in enumerate(runs):
            here = [each for each in entries if each["length"] == length and (each["model"], each["inference"]) == run]
            here.sort(key=lambda each: each["distance"])
            distances, values = ([each[name] for each in here] for name in ("distance", "mean"))
            axis.plot(distances, values, marker="o", color=f"C{i}", label=_label(run, runs), alpha=0.8)
        axis.set_xscale("log", base=2)
        axis.set(title=f"{short(length)} tokens", xlabel="tokens between the copies")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("loss of the second copy (nats a token)")
    axes[0][-1].legend(fontsize=8)
    _save(figure, path)


def _draw_accuracy(path: Path, means: Sequence[Cell]) -> None:
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(cell.benchmark for cell in means))
    runs = list(dict.fromkeys((cell.model, cell.inference) for cell in means))
    lengths = sorted({cell.length for cell in means})
    size = (1 + 4.2 * len(names), 3.8)
    figure, axes = plt.subplots(1, len(names), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        for i, run in enumerate(runs):
            here = [cell for cell in means if cell.benchmark == name and (cell.model, cell.inference) == run]
            here.sort(key=lambda cell: cell.length)
            errors = [cell.standard_error or 0 for cell in here]
            shift = 1 + 0.03 * (i - (len(runs) - 1) / 2)  # beside each other where they are equal
            positions = [cell.length * shift for cell in here]
            axis.errorbar(
                positions,
                [cell.mean for cell in here],
                errors,
                marker="o",
                capsize=3,
                color=f"C{i}",
                label=_label(run, runs),
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, map(short, lengths))
        axis.set(title=name, xlabel="length", xlim=(lengths[0] / 1.4, lengths[-1] * 1.4), ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy")
    axes[0][-1].legend(fontsize=8)
    _save(figure, path)
