"""JSON, text tables and pictures of an evaluation."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..console import text_table
from . import needle, ruler, texts
from .benchmarks import ACCURACY
from .results import Cell, Request, cells, standard_error

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
    errors = list(dict.fromkeys(result["error"] for _, result in rows if "error" in result))
    whole = {(cell.benchmark, cell.length, cell.model, cell.inference) for cell in means}
    rows = [(request, result) for request, result in rows if request.cell in whole]
    report = facts | {
        "missing": errors,
        "cells": [asdict(cell) for cell in means],
        "needle": _grouped(rows, needle.NAME, lambda sample, _: {"depth": sample.coordinates["depth"]}),
        "copy": _grouped(rows, texts.COPY, lambda sample, _: {"distance": sample.coordinates["distance"]}),
        "perplexity": _by_position(rows),
    }
    text = "\n\n".join([tables(means), *(f"Missing: {error}" for error in errors)])
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
    values = [
        [*key, next(iter(row.values())).metric, *(row[name].text if name in row else "-" for name in names)]
        for key, row in rows.items()
    ]
    densities = [
        [*key, *(row[name].density_text if name in row else "-" for name in names)] for key, row in rows.items()
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
    return [
        json.loads(key) | {"mean": float(np.mean(values)), "standard_error": standard_error(values), "num": len(values)}
        for key, values in groups.items()
    ]


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
            "standard_error": [standard_error(part) for part in zip(*parts, strict=True)],
        }
        for (model, inference, length), parts in groups.items()
    ]


# Pictures.


@dataclass(frozen=True, slots=True)
class _Line:
    """A line with error bars."""

    model: str
    inference: str
    column: str
    """Title of the panel's column."""

    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float | None]
    """None where there is one sample."""


def _draw(folder: Path, means: Sequence[Cell], report: dict[str, object]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    if report["needle"]:
        _draw_needle(folder / "needle.png", report["needle"])
    labels = {
        "perplexity": ("position", "perplexity"),
        "copy": ("tokens between the copies", "loss of the second copy (nats a token)"),
        "accuracy": ("length", "accuracy"),
    }
    lines = {
        "perplexity": _perplexity_lines(report["perplexity"]),
        "copy": _copy_lines(report["copy"]),
        "accuracy": _accuracy_lines(
            [cell for cell in means if cell.metric == ACCURACY and not cell.benchmark.startswith(f"{ruler.NAME}/")]
        ),
    }
    for name, each in lines.items():
        if each:
            _draw_lines(folder / f"{name}.png", each, *labels[name])


def _perplexity_lines(entries: Sequence[dict[str, object]]) -> list[_Line]:
    lines = []
    for entry in sorted(entries, key=lambda entry: entry["length"]):
        values = np.exp(entry["by_position"])
        errors = [error and error * value for error, value in zip(entry["standard_error"], values, strict=True)]
        x = (np.arange(len(values)) + 0.5) * entry["length"] / len(values)
        lines.append(_Line(entry["model"], entry["inference"], f"{short(entry['length'])} tokens", x, values, errors))
    return lines


def _copy_lines(entries: Sequence[dict[str, object]]) -> list[_Line]:
    groups: dict[tuple[str, str, int], list[dict[str, object]]] = {}
    for entry in sorted(entries, key=lambda entry: (entry["length"], entry["distance"])):
        groups.setdefault((entry["model"], entry["inference"], entry["length"]), []).append(entry)
    return [
        _Line(
            model,
            inference,
            f"{short(length)} tokens",
            *([each[name] for each in group] for name in ("distance", "mean", "standard_error")),
        )
        for (model, inference, length), group in groups.items()
    ]


def _accuracy_lines(means: Sequence[Cell]) -> list[_Line]:
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in sorted(means, key=lambda cell: cell.length):
        groups.setdefault((cell.model, cell.inference, cell.benchmark), []).append(cell)
    return [
        _Line(*key, *([getattr(cell, name) for cell in group] for name in ("length", "mean", "standard_error")))
        for key, group in groups.items()
    ]


def _draw_lines(path: Path, lines: Sequence[_Line], xlabel: str, ylabel: str) -> None:
    """Draw a panel for each column; of several models a row of panels for each inference, whose lines are models."""
    from matplotlib import pyplot as plt

    columns = list(dict.fromkeys(line.column for line in lines))
    models, inferences = (list(dict.fromkeys(getattr(line, name) for line in lines)) for name in ("model", "inference"))
    names, rows = (models, inferences) if len(models) > 1 else (inferences, [None])
    size = (2.6 + 3.8 * len(columns), 0.6 + 3 * len(rows))
    figure, axes = plt.subplots(
        len(rows), len(columns), figsize=size, squeeze=False, sharex="col", sharey=True, layout="constrained"
    )
    for line in lines:
        row, name = (rows.index(line.inference), line.model) if len(models) > 1 else (0, line.inference)
        i = names.index(name)
        shift = 1 + 0.02 * (i - (len(names) - 1) / 2)  # beside each other where they are equal
        axes[row][columns.index(line.column)].errorbar(
            [x * shift for x in line.x],
            line.y,
            [error or 0 for error in line.error],
            marker=MARKERS[i % len(MARKERS)],
            markersize=4,
            linewidth=1.2,
            capsize=2,
            color=f"C{i}",
            label=name,
        )
    for axis, row in zip(axes, rows, strict=True):
        axis[0].set_ylabel(f"{row} inference\n{ylabel}" if row else ylabel)
    for j, column in enumerate(columns):
        axes[0][j].set_title(column)
        axes[-1][j].set_xlabel(xlabel)
        ticks = sorted({x for line in lines if line.column == column for x in line.x})
        for axis in axes[:, j]:
            axis.grid(alpha=0.3)
            if len(ticks) <= 8:
                axis.set_xscale("log", base=2)
                axis.set_xticks(ticks, [short(int(x)) for x in ticks])
                axis.minorticks_off()
    low = min(y for line in lines for y in line.y)
    if ylabel == ACCURACY:
        axes[0][0].set_ylim(-0.05, 1.05)
    elif low > 0 and ylabel != "perplexity":
        axes[0][0].set_ylim(bottom=0)
    handles: dict[str, object] = {}
    for axis in axes.flat:
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8)
    _save(figure, path)


MARKERS = "os^vDPX*"


def short(length: int) -> str:
    """Return ``8K`` for 8192."""
    return f"{length >> 10}K" if length % 1024 == 0 else str(length)


def _save(figure: object, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_needle(path: Path, entries: Sequence[dict[str, object]]) -> None:
    """Draw a map of accuracy by length and depth for each model, a row, and inference, a column."""
    from matplotlib import pyplot as plt

    models, inferences = (list(dict.fromkeys(entry[name] for entry in entries)) for name in ("model", "inference"))
    lengths, depths = (sorted({entry[name] for entry in entries}) for name in ("length", "depth"))
    panel = max(2.4, 0.7 * len(lengths)), 0.9 + 0.36 * len(depths)
    figure, axes = plt.subplots(
        len(models),
        len(inferences),
        figsize=(1.8 + panel[0] * len(inferences), 0.6 + panel[1] * len(models)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for (i, model), (j, inference) in itertools.product(enumerate(models), enumerate(inferences)):
        axis, grid = axes[i][j], np.full((len(depths), len(lengths)), np.nan)
        for entry in entries:
            if (entry["model"], entry["inference"]) == (model, inference):
                grid[depths.index(entry["depth"]), lengths.index(entry["length"])] = entry["mean"]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if np.isnan(value):
                continue
            color = "black" if 0.15 < value < 0.85 else "white"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
        if i == 0:
            axis.set_title(f"{inference} inference", fontsize=10)
        if i == len(models) - 1:
            axis.set_xlabel("length")
        axis.set_xticks(range(len(lengths)), map(short, lengths))
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        if j == 0:
            axis.set_ylabel(f"{model}\ndepth of the needle")
    figure.colorbar(image, ax=axes.ravel().tolist(), label="accuracy")
    _save(figure, path)
