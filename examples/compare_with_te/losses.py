"""The curves of losses.sh: a table of how far each lies from the dense one, losses.json and losses.png.

python examples/compare_with_te/losses.py outputs/losses
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

RUNS = {
    "dense": "TransformerEngine",
    "dense_all_gather": "TransformerEngine, all_gather",
    "dense_unfused": "TransformerEngine, unfused",
    "every_key": "mtraining, every key",
    "selected": "mtraining, keys selected",
}
_LOSS = re.compile(r"iteration +\d+/ *\d+ .*?lm loss: (\S+)")
_DENSITY = re.compile(r"\bdensity \(%\): ([\d.]+)")
_LAST = 20
"""Iterations whose mean stands for the end of a curve."""


def read_curves(folder: Path) -> dict[str, list[float]]:
    """The losses of each run that left some, by name."""
    curves = {}
    for name in RUNS:
        log = folder / f"{name}.log"
        losses = _LOSS.findall(log.read_text(errors="replace")) if log.exists() else []
        if losses:
            curves[name] = [float(loss) for loss in losses]
    return curves


def read_densities(folder: Path) -> list[float]:
    """Density at each iteration of the run that selects, as its log says."""
    log = folder / "selected.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return [float(percent) / 100 for percent in _DENSITY.findall(text)]


def differences(curve: list[float], dense: list[float]) -> tuple[float, float]:
    """Root mean square and maximum of the relative differences of two curves, over the iterations both have."""
    relative = [abs(loss / other - 1) for loss, other in zip(curve, dense, strict=False)]
    return statistics.fmean(value**2 for value in relative) ** 0.5, max(relative)


def table(curves: dict[str, list[float]]) -> str:
    """A line for each curve."""
    rows = [f"{'run':32}{'iterations':>11}{'first':>9}{'last':>9}{'from dense, rms':>17}{'maximum':>9}"]
    for name, curve in curves.items():
        rms, largest = differences(curve, curves.get("dense", curve))
        last = statistics.fmean(curve[-_LAST:])
        rows.append(f"{RUNS[name]:32}{len(curve):11}{curve[0]:9.4f}{last:9.4f}{rms:17.1e}{largest:9.1e}")
    return "\n".join(rows)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """All curves over the iterations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("-", ":", "--", "-."), strict=False):
        axes.plot(range(1, len(curve) + 1), curve, style, label=RUNS[name], linewidth=1.3)
    axes.set(xlabel="iteration", ylabel="loss (nats per byte)", title="The same model, data and seed")
    axes.legend()
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when a run left no losses, or fewer than another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where losses.sh left its logs")
    folder = parser.parse_args(arguments).folder
    curves = read_curves(folder)
    if not curves:
        parser.error(f"folder must hold logs of losses.sh with losses in them, got {folder}.")
    densities = read_densities(folder)
    (folder / "losses.json").write_text(json.dumps({"losses": curves, "density": densities}) + "\n")
    print(table(curves))
    if densities:
        print(f"density of the selected run: {densities[0]:.1%} at first, {densities[-1]:.1%} at last")
    draw(curves, folder / "losses.png")
    return int(len({len(curve) for curve in curves.values()}) > 1)


if __name__ == "__main__":
    sys.exit(main())
