"""Table, JSON and picture of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ..config import MTrainingConfig
from .measure import Proposal, Summary, layers_of


def table(summaries: Mapping[str, Summary]) -> str:
    """Return a line for each selection."""
    width = max(map(len, summaries))
    lines = [f"{'selection':{width}}  density %  recall %  worst layer      worst head"]
    for name, summary in summaries.items():
        layer = min(summary.recall_by_layer, key=summary.recall_by_layer.__getitem__)
        worst_layer, head, recall = summary.worst_head
        lines.append(
            f"{name:{width}}  {100 * summary.density:9.1f}  {100 * summary.recall:8.1f}"
            f"  {100 * summary.recall_by_layer[layer]:5.1f} (layer {layer:2})"
            f"  {100 * recall:5.1f} (layer {worst_layer}, head {head})"
        )
    return "\n".join(lines)


def layer_table(summaries: Mapping[str, Summary]) -> str:
    """Return a line for each layer: density and recall of every selection, in per cent."""
    lines = ["layer  " + "  ".join(f"{name[:15]:>15}" for name in summaries)]
    for layer in layers_of(summaries):
        cells = (
            f"{100 * summary.density_by_layer[layer]:7.1f} {100 * summary.recall_by_layer[layer]:7.1f}"
            for summary in summaries.values()
        )
        lines.append(f"{layer:5}  " + "  ".join(cells))
    return "\n".join(lines)


def advice(proposal: Proposal, *, goal: float) -> str:
    """Return the proposal in words."""
    text = f"For a recall of {goal:g} on rows that were not probed: {proposal.flags}"
    if not proposal.is_reached:
        text += f"\nNo target that was measured reaches {goal:g}; this is the highest. Give --targets closer to 1."
    return text


def as_dict(
    configs: Mapping[str, MTrainingConfig], summaries: Mapping[str, Summary], proposal: Proposal
) -> dict[str, object]:
    """Return everything, for a JSON file."""
    return {
        "selections": {name: {"config": asdict(configs[name]), **asdict(each)} for name, each in summaries.items()},
        "proposal": asdict(proposal),
    }


def figure(configs: Mapping[str, MTrainingConfig], summaries: Mapping[str, Summary], path: Path) -> None:
    """Draw recall against density, and both by layer. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.5))
    by_cost = [
        name for name, config in configs.items() if config.pattern == "vertical_slash" and config.budget == "cost"
    ]
    left.plot(*zip(*((summaries[name].density, summaries[name].recall) for name in by_cost), strict=True), color="C0")
    for i, (name, summary) in enumerate(summaries.items()):
        left.scatter(summary.density, summary.recall, color=f"C{i}", label=name, zorder=3)
        layers = list(summary.recall_by_layer)
        middle.plot(layers, list(summary.recall_by_layer.values()), color=f"C{i}")
        right.plot(layers, list(summary.density_by_layer.values()), color=f"C{i}")
    left.set(xlabel="density", ylabel="recall", title="recall of rows that were not probed")
    left.legend(fontsize=8)
    middle.set(xlabel="layer", title="recall by layer")
    right.set(xlabel="layer", title="density by layer", ylim=(0, 1.02))
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)
