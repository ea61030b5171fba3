"""Draw the pictures of README and of the site's concepts from recorded numbers.

    python -m tools.front_page                                     # draws; needs matplotlib
    python -m tools.front_page record --cache outputs/real_cache   # measures docs/figures/data/selection.json first

``record`` reads a held-out document of 8192 tokens with the model that ``python -m examples.real_model fetch`` fetched,
SmolLM2-135M, with dense attention, and makes selections on the queries and keys of some of its layers. A minute on two
CPU cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
DATA = FIGURES / "data"
BENCHMARKS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "pretrain_gpt"
REAL_MODEL = BENCHMARKS.parent / "real_model_h200_2026-12-01"
SPARSE_RUNS = {"algorithm1": "Algorithm 1", "default": "by cost,\ntarget 0.95", "cost98": "by cost,\ntarget 0.98"}
# Okabe and Ito's palette: distinct with any kind of colour vision, and in print.
BLUE, ORANGE, GREEN, VERMILION, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#E3E3E3"
RANKS = (BLUE, ORANGE, GREEN, VERMILION)
LENGTH, LAYERS, TARGETS = 8192, (2, 6, 12, 18, 24, 30), (0.8, 0.9, 0.95, 0.98)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw all pictures, after a recording where that is asked for."""
    flags = argparse.ArgumentParser(
        prog="python -m tools.front_page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("command", nargs="?", choices=("draw", "record"), default="draw")
    flags.add_argument("--cache", type=Path, default=Path("outputs/real_cache"), help="folder that fetch filled")
    options = flags.parse_args(argv)
    if options.command == "record":
        record(options.cache, DATA / "selection.json")
    draw(FIGURES)


def record(cache: Path, path: Path) -> None:
    """Measure selections on layers of the model and write ``path``."""
    import torch

    from examples.real_model.model import load_model, model_folder
    from examples.real_model.texts import held_out_documents
    from megatron_mtraining import MTrainingConfig, hf, select
    from megatron_mtraining.metrics import attention_recall, density, held_out_rows

    model = load_model(model_folder(cache), length=LENGTH, device="cpu")
    hf.configure(model, MTrainingConfig(pattern="dense"))
    tokens = held_out_documents(cache, length=LENGTH, count=1)
    layers = {}

    def take(call) -> None:
        if call.layer in LAYERS:
            layers[call.layer] = (call.query, call.key)

    with torch.no_grad(), hf.observe(take):
        model.model(tokens)
    selections = {f"{target:g}": MTrainingConfig(dense_below=0, target_recall=target) for target in TARGETS}
    selections["algorithm 1"] = MTrainingConfig.algorithm_1(dense_below=0)
    rows = held_out_rows(*selections.values(), seq_len=LENGTH, count=64, first=LENGTH // 4)
    result: dict = {
        "model": "SmolLM2-135M-Instruct",
        "length": LENGTH,
        "layers": list(layers),
        "text": "held-out source code",
        "rows": len(rows),
        "selections": {},
    }
    for name, config in selections.items():
        cells = []
        for layer, (query, key) in layers.items():
            index = select(query, key, config)
            shares = density(index, seq_len=LENGTH).tolist()
            recalls = attention_recall(query, key, index, rows=rows).mean((0, 2)).tolist()
            cells += [
                {"layer": layer, "head": head, "density": round(share, 5), "recall": round(recall, 5)}
                for head, (share, recall) in enumerate(zip(shares, recalls, strict=True))
            ]
            if name == "0.95":
                result.setdefault("heads", {})[str(layer)] = [
                    {
                        "vertical": index.vertical[0, head, : index.num_vertical[0, head]].tolist(),
                        "slash": index.slash[0, head, : index.num_slash[0, head]].tolist(),
                    }
                    for head in range(index.vertical.shape[1])
                ]
        result["selections"][name] = cells
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")


def draw(folder: Path) -> None:
    """Draw every picture into ``folder``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False})
    selection = json.loads((DATA / "selection.json").read_text())
    runs = {run: json.loads((REAL_MODEL / f"{run}_a_0.json").read_text()) for run in ("dense", *SPARSE_RUNS)}
    times = {
        (run["seq_length"], run["contender"]): run["iteration_ms"]
        for run in json.loads((BENCHMARKS / "131072_524288_4xh200_2026-11-30.json").read_text())
    }
    for name, shape, size in (("front_page", (1, 3), (13.2, 4.3)), ("front_page_narrow", (3, 1), (4.6, 12.2))):
        figure, (mask, time, loss) = plt.subplots(*shape, figsize=size, layout="constrained")
        draw_mask(mask, selection)
        draw_times(time, times)
        draw_losses(loss, runs)
        save(figure, folder / f"{name}.png")
    for name, shape, size in (("", (1, 2), (8.6, 4.2)), ("_narrow", (2, 1), (4.6, 8.2))):
        figure, axes = plt.subplots(*shape, figsize=size, layout="constrained")
        for each, layout in zip(axes, ("zigzag", "striped"), strict=True):
            draw_layout(each, layout)
        save(figure, folder / f"concept_stripes{name}.png")
        figure, axes = plt.subplots(*shape, figsize=size, layout="constrained")
        draw_budget(*axes, selection)
        save(figure, folder / f"concept_budget{name}.png")
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    draw_schedule(axes)
    save(figure, folder / "concept_schedule.png")


def save(figure, path: Path) -> None:
    """Write a PNG whose bytes depend on the picture alone."""
    figure.savefig(path, dpi=130, metadata={"Software": None})


def head_to_show(selection: dict) -> tuple[str, int, float]:
    """Return layer, head and density of the sparse head with most runs of distances, of several the sparsest."""
    density = {(str(cell["layer"]), cell["head"]): cell["density"] for cell in selection["selections"]["0.95"]}

    def order(position: tuple[str, int]) -> tuple[int, float]:
        slash = selection["heads"][position[0]][position[1]]["slash"]
        return sum(distance - 1 not in slash for distance in slash), -density[position]

    layer, head = max((position for position, share in density.items() if share < 0.15), key=order)
    return layer, head, density[layer, head]


def draw_mask(axes, selection: dict) -> None:
    """Draw the pairs that a head computes; a column is drawn wider than its one key."""
    import numpy as np

    block, length = 64, selection["length"]
    layer, head, density = head_to_show(selection)
    index = selection["heads"][layer][head]
    rows, columns = np.indices((length // block, length // block))
    grey, blue = ([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in ("#ECECEC", BLUE))
    image = np.ones((*rows.shape, 3))
    image[rows >= columns] = grey
    axes.imshow(image, extent=(0, length, length, 0), interpolation="nearest")
    axes.vlines(index["vertical"], index["vertical"], length, color=ORANGE, linewidth=0.35, alpha=0.8)
    is_slash = np.isin(rows - columns, index["slash"]) & (rows >= columns)
    image = np.dstack([np.broadcast_to(blue, (*rows.shape, 3)), is_slash])
    axes.imshow(image, extent=(0, length, length, 0), interpolation="nearest", zorder=3)
    axes.set_title(f"One head computes {density:.0%} of its pairs")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    ticks = range(0, length + 1, 2048)
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    for height, text, colour in (
        (0.05, f"{len(index['vertical'])} columns", "#B27700"),
        (0.12, f"{len(index['slash'])} distances", BLUE),
        (0.19, "not computed", "#777777"),
        (0.26, f"SmolLM2-135M, layer {layer}", "#777777"),
    ):
        axes.text(0.97 * length, height * length, text, color=colour, ha="right", va="top")


def draw_times(axes, times: dict[tuple[int, str], float]) -> None:
    """Draw the time of an iteration beside TransformerEngine's, at two lengths."""
    lengths = sorted({length for length, _ in times})
    for number, (system, colour, label) in enumerate(
        (("transformer_engine", "#9A9A9A", "TransformerEngine, dense"), ("mtraining", BLUE, "this package, 5 %"))
    ):
        values = [times[length, system] / 1000 for length in lengths]
        spots = [i + (number - 0.5) * 0.38 for i in range(len(lengths))]
        axes.bar(spots, values, 0.36, color=colour, label=label)
        for spot, value, length in zip(spots, values, lengths, strict=True):
            text = f"{value:.2f} s"
            if system == "mtraining":
                text += f"\n{times[length, 'transformer_engine'] / times[length, system]:.1f}x"
            axes.text(spot, value + 0.1, text, ha="center", va="bottom")
    axes.set_ylim(0, 13)
    axes.set_yticks([0, 5, 10], ["0", "5 s", "10 s"])
    axes.set_xticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
    axes.set_title("pretrain_gpt.py, an iteration on 4 H200")
    axes.legend(frameon=False, loc="upper left")


def draw_losses(axes, runs: dict[str, dict]) -> None:
    """Draw how far the held-out loss of sparse training is above that of dense training."""
    dense = runs["dense"]["held_out"]["dense"]["loss"]
    spots = range(len(SPARSE_RUNS))
    for offset, inference, colour, label in (
        (-0.19, "own", SKY, "sparse inference"),
        (0.19, "dense", BLUE, "dense inference"),
    ):
        values = [100 * (runs[run]["held_out"][inference]["loss"] / dense - 1) for run in SPARSE_RUNS]
        axes.barh([spot + offset for spot in spots], values, 0.36, color=colour, label=label)
        for spot, value in zip(spots, values, strict=True):
            axes.text(value + 0.1, spot + offset, f"+{value:.2f} %", va="center", fontsize=9)
    densities = [sum(runs[run]["density_by_layer"]) / len(runs[run]["density_by_layer"]) for run in SPARSE_RUNS]
    names = zip(SPARSE_RUNS.values(), densities, strict=True)
    axes.set_yticks(spots, [f"{name}\n({density:.0%})" for name, density in names], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 7.5)
    axes.set_xlabel("held-out loss above dense training, %")
    axes.set_title("SmolLM2-135M, 100 steps of 65536 tokens")
    axes.legend(frameon=False, loc="lower right", fontsize=9)


def draw_layout(axes, kind: str) -> None:
    """Draw which of four ranks computes each pair of blocks under a layout."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    from megatron_mtraining import SequenceLayout, token_positions

    num_blocks, slashes = 32, (0, 5, 6, 13)
    layout = SequenceLayout(kind, seq_len=num_blocks * 64, cp_size=4)
    owner = np.empty(num_blocks, dtype=int)
    for rank in range(4):
        owner[token_positions(layout, cp_rank=rank).numpy()[::64] // 64] = rank
    rows, columns = np.indices((num_blocks, num_blocks))
    image = np.where(np.isin(rows - columns, slashes), 1 + owner[rows], 0)
    image[rows < columns] = 5
    axes.imshow(image, cmap=ListedColormap([GREY, *RANKS, "white"]), vmin=0, vmax=5, interpolation="nearest")
    counts = [int((image == 1 + rank).sum()) for rank in range(4)]
    axes.set_title(f"{kind}: " + ", ".join(str(count) for count in counts) + " blocks")
    axes.set_xlabel("block of keys")
    axes.set_ylabel("block of queries")
    axes.set_xticks([])
    axes.set_yticks([])
    for rank in range(4):
        axes.text(31, 1 + 2.4 * rank, f"rank {rank}", color=RANKS[rank], ha="right", va="center", weight="bold")


def draw_schedule(axes) -> None:
    """Draw compute and transfers of one rank in the hierarchical ring of two nodes of four ranks."""
    num_inner, num_nodes = 4, 2
    for step in range(num_inner * num_nodes):
        node, inner = divmod(step, num_inner)
        axes.barh(2, 0.94, left=step, color=(BLUE, GREEN)[node], height=0.6)
        key_rank = (0 - inner) % num_inner + num_inner * node
        axes.text(step + 0.47, 2, f"keys of\nrank {key_rank}", ha="center", va="center", color="white", fontsize=9)
        if inner < num_inner - 1:
            axes.barh(1, 0.8, left=step, color=SKY, height=0.5)
    axes.barh(0, num_inner - 0.2, left=0, color=ORANGE, height=0.5)
    axes.text(num_inner / 2, 0, "keys of the other node, posted first", ha="center", va="center")
    axes.text(0.4, 1, "NVLink", ha="center", va="center", fontsize=9)
    axes.set_yticks([0, 1, 2], ["between\nnodes", "inside\nthe node", "compute"])
    axes.set_xticks(range(0, num_inner * num_nodes + 1, num_inner), ["", "", ""])
    axes.set_xlabel("ring steps of rank 0; 2 nodes of 4 ranks")
    axes.axvline(num_inner - 0.03, color="black", linewidth=0.8, linestyle=":")
    axes.set_title("The slow transfer has all steps of a node to complete")
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)


def draw_budget(curve, heads, selection: dict) -> None:
    """Draw density and recall by target, and the densities of all heads at one target."""

    def mean(name: str, key: str) -> float:
        cells = selection["selections"][name]
        return sum(cell[key] for cell in cells) / len(cells)

    names = [f"{target:g}" for target in TARGETS]
    curve.plot([mean(name, "density") for name in names], [mean(name, "recall") for name in names], "o-", color=BLUE)
    for name in names:
        spot = (mean(name, "density"), mean(name, "recall"))
        curve.annotate(f"target {name}", spot, (6, -14), textcoords="offset points", ha="left")
    paper = (mean("algorithm 1", "density"), mean("algorithm 1", "recall"))
    curve.plot(*paper, "s", color=VERMILION)
    curve.annotate("Algorithm 1", paper, (-4, 8), textcoords="offset points", color=VERMILION, ha="right")
    curve.set_xlabel("density: share of the causal pairs")
    curve.set_ylabel("recall on rows that were not probed")
    curve.set_xlim(0, 0.65)
    curve.set_ylim(0.8, 1)
    curve.set_title("More recall costs more pairs")
    for number, layer in enumerate(selection["layers"]):
        shares = sorted(cell["density"] for cell in selection["selections"]["0.95"] if cell["layer"] == layer)
        heads.plot([number + (i - 4) * 0.07 for i in range(len(shares))], shares, "o", color=BLUE, markersize=4)
    heads.set_xticks(range(len(selection["layers"])), [str(layer) for layer in selection["layers"]])
    heads.set_xlabel("layer; a dot is a head")
    heads.set_ylabel("density at target 0.95")
    heads.set_title("Each head computes its own share")
    from matplotlib.ticker import PercentFormatter

    curve.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    curve.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    heads.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


if __name__ == "__main__":
    main(sys.argv[1:])
