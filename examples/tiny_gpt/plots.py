"""Three pictures of a run, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from megatron_mtraining.metrics import RingWork

from .journal import Journal
from .observe import Attention

# Okabe and Ito's palette: told apart with any kind of colour vision, and in print.
BLUE, ORANGE, GREEN, VERMILION, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#E3E3E3"
COMPARED_LAYOUTS = ("zigzag", "striped", "rotated")
WIDTH_INCHES = 9.0
DPI = 130


def draw_pictures(journal: Journal, attention: Attention, folder: Path) -> list[Path]:
    """Writes ``losses.png``, ``selected_set.png`` and ``work.png`` into ``folder``; returns their paths."""
    paths = [folder / name for name in ("losses.png", "selected_set.png", "work.png")]
    draw_losses(journal, paths[0])
    layer, head = farthest_head(attention)
    draw_head(attention, layer, head, paths[1])
    work = {layout: attention.work(layer, layout=layout) for layout in COMPARED_LAYOUTS}
    draw_work(work, title=f"Work of layer {layer}, all heads, with the same selected set", path=paths[2])
    return paths


def farthest_head(attention: Attention) -> tuple[int, int]:
    """Layer and head whose distances reach farthest in sum: the picture with the most to see."""

    def reach(place: tuple[int, int]) -> int:
        index = attention.layers[place[0]].index
        return int(index.slash[0, place[1], : index.num_slash[0, place[1]]].sum())

    heads = [(layer, head) for layer, record in attention.layers.items() for head in range(record.index.num_lists)]
    return max(heads, key=reach)


def draw_losses(journal: Journal, path: Path) -> None:
    """Training and held-out loss over the steps; below, what attention kept and how much of its mass that held."""
    figure, (losses, kept) = plt.subplots(
        2, 1, figsize=(WIDTH_INCHES, 6.2), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    _plot_losses(losses, journal)
    _plot_kept(kept, journal)
    has_both_phases = 0 < journal.dense_steps < len(journal.losses)
    for axes in (losses, kept):
        if has_both_phases:
            axes.axvline(journal.dense_steps + 0.5, color="black", linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if has_both_phases:
        top = losses.get_ylim()[1]
        losses.annotate("dense ", (journal.dense_steps + 0.5, top), va="top", ha="right", fontsize=9)
        losses.annotate(" sparse", (journal.dense_steps + 0.5, top), va="top", fontsize=9)
    _save(figure, path)


def _plot_losses(axes: Axes, journal: Journal) -> None:
    steps = range(1, len(journal.losses) + 1)
    axes.plot(steps, journal.losses, color=SKY, linewidth=0.8, alpha=0.8, label="training, each step")
    axes.plot(steps, _smoothed(journal.losses), color=BLUE, linewidth=2, label="training, running mean")
    observed = [seen.step for seen in journal.observations]
    held_out = [seen.held_out_loss for seen in journal.observations]
    axes.plot(observed, held_out, color=ORANGE, marker="o", markersize=4, label="held-out text, of the same length")
    end, last = journal.final, {"linestyle": "none", "clip_on": False, "zorder": 3}
    dense, sparse = f"validation, dense: {end.dense_loss:.4f}", f"validation, sparse: {end.sparse_loss:.4f}"
    axes.plot(steps[-1], end.dense_loss, color=VERMILION, marker="D", markersize=7, label=dense, **last)
    axes.plot(steps[-1], end.sparse_loss, color=GREEN, marker="x", markersize=9, mew=2, label=sparse, **last)
    axes.set(ylabel="loss (nats per byte)", title="Dense warm-up, then sparse attention")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.63, 1.0))  # left of the switch and its label


def _plot_kept(axes: Axes, journal: Journal) -> None:
    observed = [seen.step for seen in journal.observations]
    kept = [100 * seen.density for seen in journal.observations]
    recalled = [100 * seen.recall for seen in journal.observations]
    # Steps, because what is kept jumps where attention becomes sparse and says nothing of the time between.
    style = {"drawstyle": "steps-pre", "markersize": 4}
    axes.plot(observed, recalled, color=GREEN, marker="^", label="attention mass recalled, held-out rows", **style)
    axes.plot(observed, kept, color=VERMILION, marker="s", label="causal pairs kept", **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="training step", ylabel="share (%)", ylim=(-4, 108))
    axes.legend(frameon=False, loc="center left")


def _smoothed(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Exponential running mean, corrected for its start."""
    means, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        means.append(mean / weight)
    return means


NOT_CAUSAL, LEFT_OUT, LOCAL, CHOSEN_SLASH, SINK, CHOSEN_VERTICAL = range(6)
KEPT_COLOURS = ("white", GREY, SKY, BLUE, ORANGE, VERMILION)
KEPT_LABELS = {
    LOCAL: "local blocks",
    CHOSEN_SLASH: "chosen slashes",
    SINK: "sinks",
    CHOSEN_VERTICAL: "chosen verticals",
    LEFT_OUT: "left out",
}


def selected_set_picture(
    vertical: Tensor,
    slash: Tensor,
    *,
    seq_len: int,
    block_size: int,
    sink_tokens: int,
    local_blocks: int,
    pixels: int = 1024,
) -> Tensor:
    """Which pairs a head keeps, and why: int64 ``[pixels, pixels]`` over (query, key), of the six classes above.

    Args:
        vertical: int ``[count]``, key positions, without padding.
        slash: int ``[count]``, block distances, without padding.
        seq_len: tokens in the sequence; a pixel stands for ``seq_len / pixels`` of them.
        block_size: tokens in a block.
        sink_tokens: leading positions that are kept always.
        local_blocks: distances that are kept always.
        pixels: width and height; at most ``seq_len``.
    """
    pixels = min(pixels, seq_len)
    position = torch.arange(pixels) * seq_len // pixels
    block = position // block_size
    distance = block[:, None] - block[None, :]
    picture = torch.full((pixels, pixels), LEFT_OUT)
    picture[torch.isin(distance, slash.long())] = CHOSEN_SLASH
    picture[(distance < local_blocks) & (distance >= 0)] = LOCAL
    columns = (vertical.long() * pixels // seq_len).unique()
    is_sink = columns < -(-sink_tokens * pixels // seq_len)
    # Drawn over the slashes: a column is thin, and covered pairs count once whatever their colour.
    picture[:, columns[~is_sink]] = CHOSEN_VERTICAL
    picture[:, columns[is_sink]] = SINK
    picture[position[None, :] > position[:, None]] = NOT_CAUSAL
    return picture


def draw_head(attention: Attention, layer: int, head: int, path: Path) -> None:
    """One head's selected set of a held-out text."""
    record, config = attention.layers[layer], attention.config
    index = record.index.to("cpu")
    picture = selected_set_picture(
        index.vertical[0, head, : index.num_vertical[0, head]],
        index.slash[0, head, : index.num_slash[0, head]],
        seq_len=record.layout.seq_len,
        block_size=index.block_size,
        sink_tokens=config.sink_tokens,
        local_blocks=config.local_blocks,
    )
    title = (
        f"Layer {layer}, head {head + 1}: {100 * float(attention.density(layer)[head]):.1f} % of the causal pairs, "
        f"{100 * float(attention.recall[layer][head]):.1f} % of the attention mass"
    )
    draw_selected_set(picture, seq_len=record.layout.seq_len, title=title, path=path)


def draw_selected_set(picture: Tensor, *, seq_len: int, title: str, path: Path) -> None:
    """The causal triangle of one head, queries downwards, keys to the right."""
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 8.2), layout="constrained")
    colours = ListedColormap(KEPT_COLOURS)
    axes.imshow(picture, cmap=colours, vmin=-0.5, vmax=5.5, interpolation="nearest", extent=(0, seq_len, seq_len, 0))
    axes.set(xlabel="key position (token)", ylabel="query position (token)", title=title)
    patches = [Patch(color=KEPT_COLOURS[kind], label=label) for kind, label in KEPT_LABELS.items()]
    axes.legend(handles=patches, loc="upper right", frameon=False, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def draw_work(work: Mapping[str, RingWork], *, title: str, path: Path) -> None:
    """Work per rank and ring step, one panel for each layout, in per cent of an even share of all the work.

    The vertical pairs, which every rank computes in its first step, are the column ``V``.
    """
    figure, panels = plt.subplots(1, len(work), figsize=(WIDTH_INCHES, 3.4), sharey=True, layout="constrained")
    shares = {layout: _share_of_even(ring) for layout, ring in work.items()}
    highest = max(float(share.max()) for share in shares.values())
    for axes, (layout, share) in zip(panels, shares.items(), strict=True):
        image = axes.imshow(share, cmap="cividis", vmin=0, vmax=highest)
        for rank, stage in torch.cartesian_prod(*map(torch.arange, share.shape)).tolist():
            value = float(share[rank, stage])
            colour = "white" if value < 0.6 * highest else "black"
            axes.text(stage, rank, f"{value:.0f}", ha="center", va="center", color=colour)
        imbalance = f"imbalance: worker {work[layout].worker_imbalance:.2f}, step {work[layout].step_imbalance:.2f}"
        axes.set_title(f"{layout}\n{imbalance}", fontsize=10)
        stages = ["V", *map(str, range(share.shape[1] - 1))]
        axes.set_xticks(range(len(stages)), stages)
        axes.set(xlabel="verticals, ring steps", yticks=range(share.shape[0]))
    panels[0].set_ylabel("rank")
    figure.colorbar(image, ax=panels, label="pairs (% of a rank's even share)", shrink=0.85)
    figure.suptitle(title)
    _save(figure, path)


def _share_of_even(work: RingWork) -> Tensor:
    """float64 ``[cp_size, 1 + steps]``: each rank's vertical pairs and ring steps, in % of the mean rank's total."""
    pairs = torch.cat([work.vertical[:, None], work.slash], dim=1).double()
    return 100 * pairs / (pairs.sum() / pairs.shape[0])


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
