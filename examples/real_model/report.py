"""Write the table and the figure of finished runs: ``python -m examples.real_model report --out OUT``."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from megatron_mtraining.errors import invalid

from .runs import RUNS

COLUMNS = (
    "| attention in training | density | loss, dense inference | loss, own inference "
    "| second copy, dense | second copy, own | recall | ms a step |"
)


def main(argv: list[str]) -> None:
    """Print the table; write ``report.md`` and ``report.png`` beside the results."""
    parser = argparse.ArgumentParser(prog="python -m examples.real_model report", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args(argv)
    results = load(options.out)
    text = table(results)
    print(text)
    (options.out / "report.md").write_text(text + "\n")
    figure(results, options.out / "report.png")


def load(folder: Path) -> list[dict]:
    """Read the results, in the order of the runs.

    Raises:
        ValueError: there are none.
    """
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*_*_*.json"))]
    if not results:
        raise invalid("--out", "a folder with results", folder, "Run: python -m examples.real_model train")
    return sorted(results, key=lambda result: (result["text"], list(RUNS).index(result["run"]), result["seed"]))


def table(results: list[dict]) -> str:
    """Return a table for each text: means over seeds, and differences from the dense run of the same seeds."""
    lines = []
    for text in sorted({result["text"] for result in results}):
        of_text = [result for result in results if result["text"] == text]
        lines += [f"Text {text}, {of_text[0]['length']} tokens, {of_text[0]['steps']} steps", "", COLUMNS, _rule()]
        by_run = defaultdict(list)
        for result in of_text:
            by_run[result["run"]].append(result)
        base = {result["seed"]: result["held_out"]["dense"]["loss"] for result in by_run.get("dense", [])}
        lines += [row(run, each, base) for run, each in by_run.items()] + [""]
    return "\n".join(lines)


def row(run: str, results: list[dict], base: dict[int, float]) -> str:
    """Return one line of the table."""
    own = "own" if "own" in results[0]["held_out"] else "default"
    cells = [f"{run} ({len(results)})" if len(results) > 1 else run, _density(results)]
    cells += [_loss(results, attention, base) for attention in ("dense", own)]
    cells += [_mean(result["held_out"][attention]["second_copy"] for result in results) for attention in ("dense", own)]
    cells.append(_mean(statistics.fmean(result["recall_by_layer"]) for result in results))
    times = [result["median_step_ms"] for result in results if result["median_step_ms"] is not None]
    cells.append(f"{statistics.fmean(times):.0f}" if times else "")
    return "| " + " | ".join(cells) + " |"


def _rule() -> str:
    return "|" + "---|" * (COLUMNS.count("|") - 1)


def _density(results: list[dict]) -> str:
    shares = [statistics.fmean(result["density_by_layer"]) for result in results if result["density_by_layer"]]
    return f"{100 * statistics.fmean(shares):.1f} %" if shares else ""


def _mean(values: object) -> str:
    values = list(values)
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def _loss(results: list[dict], attention: str, base: dict[int, float]) -> str:
    losses = [result["held_out"][attention]["loss"] for result in results]
    text = f"{statistics.fmean(losses):.4f}"
    pairs = [
        (loss, base[result["seed"]]) for loss, result in zip(losses, results, strict=True) if result["seed"] in base
    ]
    if not pairs or (results[0]["run"] == "dense" and attention == "dense"):
        return text
    changes = [100 * (loss / dense - 1) for loss, dense in pairs]
    spread = f" ± {statistics.stdev(changes):.2f}" if len(changes) > 1 else ""
    return f"{text} ({statistics.fmean(changes):+.2f}{spread} %)"


def figure(results: list[dict], path: Path) -> None:
    """Draw training losses beside the dense run's, density by layer, and held-out loss by position."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    texts = sorted({result["text"] for result in results})
    fig, rows = plt.subplots(len(texts), 3, figsize=(15, 4 * len(texts)), squeeze=False)
    for axes, text in zip(rows, texts, strict=True):
        first_seed = {}
        for result in (each for each in results if each["text"] == text):
            first_seed.setdefault(result["run"], result)
        for run, result in first_seed.items():
            color = f"C{list(RUNS).index(run)}"
            if result["loss"]:
                axes[0].plot(_smooth(result["loss"]), label=run, color=color)
                axes[1].plot(range(1, len(result["density_by_layer"]) + 1), result["density_by_layer"], color=color)
            own = result["held_out"].get("own", result["held_out"]["dense"])
            axes[2].plot(own["loss_by_position"], marker="o", color=color)
        axes[0].set(title=f"text {text}: training loss, mean of 10 steps", xlabel="step", ylabel="nats a token")
        axes[1].set(title="density by layer", xlabel="layer", ylim=(0, 1.02))
        axes[2].set(title="held-out loss by part of the document, own attention", xlabel="eighth of the document")
        axes[0].legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def _smooth(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, step - 9) : step + 1]) for step in range(len(losses))]
