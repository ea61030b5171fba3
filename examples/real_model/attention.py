"""Measure how the attention of the model behaves in training: docs/attention_in_training.md has the figures.

    python -m examples.real_model attention --cache CACHE --out OUT --length 32768

The model trains for a few steps with dense attention. Between them a held-out document passes through it, and some of
its layers are measured: which keys are top keys, and for how long; where the mass lies; how much of the gradient the
keys of the forward pass cover; and whether the scores by distance follow from rotary embedding alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_mtraining import MTrainingConfig, hf, select
from megatron_mtraining.errors import as_integer
from megatron_mtraining.metrics import attention_recall, density, held_out_rows
from megatron_mtraining.metrics.lists import counted_slashes, counted_verticals
from megatron_mtraining.types import VerticalSlashIndex

from .losses import autocast, token_losses
from .model import load_model, model_folder
from .texts import held_out_documents, training_documents
from .train import Training, train_step

NUM_ROWS = 64
NUM_KEYS_SHARES = (0.01, 0.05, 0.1, 0.2)
"""Shares of a row's keys whose mass is measured: its own best ones."""

DENSE, DEFAULT = MTrainingConfig(pattern="dense"), MTrainingConfig(dense_below=0)
DISTANCES = tuple(2**i for i in range(17))


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention of one layer on one document, and its gradient; tensors have a batch of 1."""

    query: Tensor
    """``[1, seq, num_heads, head_dim]``, after rotary embedding."""

    key: Tensor
    """``[1, seq, num_kv_heads, head_dim]``, likewise."""

    value: Tensor
    grad_out: Tensor | None
    """Gradient of the layer's output, as ``query``; None without a backward pass."""


def main(argv: Sequence[str]) -> None:
    """Measure, print and write ``attention.json`` and ``attention.png``."""
    options = parser().parse_args(argv)
    folder = None if options.tiny else options.model or model_folder(options.cache)
    length = as_integer("--length", options.length, least=512)
    model = load_model(folder, length=length, device=options.device)
    hf.configure(model, DENSE)
    documents = held_out_documents(options.cache, length=length, count=2)
    steps = options.every * options.times
    training = training_documents(options.cache, options.text, length=length, count=steps, seed=0)
    total = model.config.num_hidden_layers
    layers = sorted({1, *range(2, total + 1, max(1, total // options.layers))})
    result = measure(model, documents.to(options.device), training.to(options.device), layers, every=options.every)
    result |= {"length": length, "layers": layers, "model": str(folder or "tiny")}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attention.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    figure(result, options.out / "attention.png")


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    flags = argparse.ArgumentParser(
        prog="python -m examples.real_model attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--cache", type=Path, required=True, help="folder that fetch filled")
    flags.add_argument("--out", type=Path, required=True, help="folder of the results")
    flags.add_argument("--text", default="a", help="training text")
    flags.add_argument("--length", type=int, default=2048, help="tokens of a document")
    flags.add_argument("--layers", type=int, default=6, help="layers to measure, beside the first")
    flags.add_argument("--every", type=int, default=2, help="training steps between measurements")
    flags.add_argument("--times", type=int, default=2, help="measurements after training steps")
    flags.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    model = flags.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a Hugging Face folder instead of the fetched weights")
    model.add_argument("--tiny", action="store_true", help="two layers of random weights, 512 words: a dry run")
    return flags


def measure(
    model: nn.Module, documents: Tensor, training: Tensor, layers: Sequence[int], *, every: int
) -> dict[str, object]:
    """Return the measurements by name, each by layer.

    Args:
        model: with dense attention.
        documents: int64 ``[2, length]``, held out: one to observe, one to select on.
        training: int64 ``[steps, length]``.
        layers: numbers from 1.
        every: training steps between observations.
    """
    length = documents.shape[1]
    rows = held_out_rows(DEFAULT, seq_len=length, count=NUM_ROWS, first=length // 4)
    settings = Training(
        length=length, steps=len(training), learning_rate=2e-4, warmup_steps=0, recompute=False, held_out=1
    )
    first = observe_layers(model, documents[0], layers, backward=True)
    other = observe_layers(model, documents[1], layers, backward=False)
    indices = {layer: select_default(each) for layer, each in first.items()}
    result: dict[str, object] = {
        "recall": {layer: recall(first[layer], indices[layer], rows) for layer in layers},
        "recall_of_other_text": {layer: recall(first[layer], select_default(other[layer]), rows) for layer in layers},
        "density": {layer: float(density(indices[layer], seq_len=length).mean()) for layer in layers},
        "mass": {layer: mass(first[layer], rows) for layer in layers},
        "gradient": {layer: gradient_coverage(first[layer], indices[layer], rows) for layer in layers},
        "distances": {layer: distance_fit(model, first[layer]) for layer in layers},
    }
    top = {layer: top_columns(first[layer], rows) for layer in layers}
    result["top_columns_of_other_rows"] = {
        layer: overlap(top_columns(first[layer], rows[::2]), top_columns(first[layer], rows[1::2])) for layer in layers
    }
    del first, other
    over_steps = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step, document in enumerate(training, 1):
        train_step(model, optimizer, document)
        if step % every == 0:
            now = observe_layers(model, documents[0], layers, backward=False)
            over_steps.append(
                {
                    "step": step,
                    "recall_of_first_index": {layer: recall(now[layer], indices[layer], rows) for layer in layers},
                    "recall_of_own_index": {
                        layer: recall(now[layer], select_default(now[layer]), rows) for layer in layers
                    },
                    "top_columns": {layer: overlap(top[layer], top_columns(now[layer], rows)) for layer in layers},
                }
            )
    return result | {"over_steps": over_steps}


def observe_layers(model: nn.Module, document: Tensor, layers: Sequence[int], *, backward: bool) -> dict[int, Layer]:
    """Pass a document through the model and return what some of its layers computed with."""
    calls: dict[int, tuple[Tensor, Tensor]] = {}
    values: dict[int, Tensor] = {}
    grads: dict[int, Tensor] = {}

    def take(call: object) -> None:
        if call.layer in layers:
            calls[call.layer] = call.query, call.key

    model.eval()
    with (
        capture(model, layers, values, grads),
        hf.observe(take),
        autocast(str(document.device)),
        torch.set_grad_enabled(backward),
    ):
        loss = token_losses(model, document).mean()
    if backward:
        loss.backward()
        model.zero_grad(set_to_none=True)
    model.train()
    found = {}
    for layer in layers:
        query, key = calls[layer]
        grad = grads.get(layer)
        found[layer] = Layer(
            query,
            key,
            values[layer].view_as(key).to(key.dtype),
            None if grad is None else grad.view_as(query).to(query.dtype),
        )
    return found


@contextmanager
def capture(
    model: nn.Module, layers: Sequence[int], values: dict[int, Tensor], grads: dict[int, Tensor]
) -> Iterator[None]:
    """Store values, and gradients of attention outputs once they are computed, while the context lasts."""
    handles = []
    for layer in layers:
        attention = model.model.layers[layer - 1].self_attn

        def take_value(_: nn.Module, __: object, output: Tensor, layer: int = layer) -> None:
            values[layer] = output.detach()

        def take_output(_: nn.Module, inputs: tuple[Tensor], layer: int = layer) -> None:
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda grad: grads.__setitem__(layer, grad.detach()))

        handles.append(attention.v_proj.register_forward_hook(take_value))
        handles.append(attention.o_proj.register_forward_pre_hook(take_output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def select_default(layer: Layer) -> VerticalSlashIndex:
    """Return the keys that the default configuration selects."""
    return select(layer.query, layer.key, DEFAULT)


def recall(layer: Layer, index: VerticalSlashIndex, rows: Sequence[int]) -> float:
    """Return the mean recall of some rows."""
    return float(attention_recall(layer.query, layer.key, index, rows=rows).mean())


@torch.no_grad()
def probabilities(layer: Layer, rows: Sequence[int], head: int) -> Tensor:
    """float32 ``[rows, seq]``: dense attention of one head."""
    row = torch.tensor(rows, device=layer.key.device)
    group = layer.query.shape[2] // layer.key.shape[2]
    scores = layer.query[0, row, head].float() @ layer.key[0, :, head // group].float().T
    position = torch.arange(layer.key.shape[1], device=row.device)
    return (scores * layer.query.shape[3] ** -0.5).masked_fill(position > row[:, None], -torch.inf).softmax(1)


def selected_mask(index: VerticalSlashIndex, rows: Sequence[int], *, seq_len: int) -> Tensor:
    """bool ``[num_lists, rows, seq]``: True for the selected keys of some rows of one document."""
    vertical, slash = (counted(index, seq_len=seq_len)[0] for counted in (counted_verticals, counted_slashes))
    num_blocks = -(-seq_len // index.block_size)
    is_vertical = torch.zeros(len(vertical), seq_len + 1, dtype=torch.bool, device=index.device)
    is_distance = torch.zeros(len(slash), num_blocks + 1, dtype=torch.bool, device=index.device)
    is_vertical.scatter_(1, vertical, True)
    is_distance.scatter_(1, slash, True)
    row, position = torch.tensor(rows, device=index.device)[:, None], torch.arange(seq_len, device=index.device)
    distance = (row // index.block_size - position // index.block_size).clamp(min=0)
    return (is_vertical[:, None, :seq_len] | is_distance[:, distance]) & (position <= row)


def mass(layer: Layer, rows: Sequence[int]) -> dict[str, float]:
    """Return the mean share of attention on the first 16 keys, on near keys, and on each row's own best keys."""
    position = torch.arange(layer.key.shape[1], device=layer.key.device)
    row = torch.tensor(rows, device=layer.key.device)[:, None]
    shares: dict[str, list[Tensor]] = {}
    for head in range(layer.query.shape[2]):
        p = probabilities(layer, rows, head)
        shares.setdefault("first 16 keys", []).append((p * (position < 16)).sum(1).mean())
        shares.setdefault("last 128 keys", []).append((p * (position > row - 128)).sum(1).mean())
        ordered = p.sort(dim=1, descending=True).values.cumsum(1)
        for share in NUM_KEYS_SHARES:
            count = (row[:, 0] * share).long().clamp(min=1)
            shares.setdefault(f"best {share:.0%} of keys", []).append(ordered.gather(1, count[:, None] - 1).mean())
    return {name: float(torch.stack(each).mean()) for name, each in shares.items()}


def top_columns(layer: Layer, rows: Sequence[int], count: int = 256) -> Tensor:
    """int64 ``[num_heads, count]``: keys with the largest mean attention over some rows, near keys left out."""
    row = torch.tensor(rows, device=layer.key.device)[:, None]
    position = torch.arange(layer.key.shape[1], device=row.device)
    is_near = position > row - 128
    heads = range(layer.query.shape[2])
    means = torch.stack([probabilities(layer, rows, head).masked_fill(is_near, 0).mean(0) for head in heads])
    return means.topk(min(count, means.shape[1] // 8), dim=1).indices


def overlap(first: Tensor, second: Tensor) -> float:
    """Return the share of the entries of ``first`` that ``second`` has too, head by head."""
    return float((first[:, :, None] == second[:, None]).any(2).float().mean())


@torch.no_grad()
def gradient_coverage(layer: Layer, index: VerticalSlashIndex, rows: Sequence[int]) -> dict[str, float]:
    """Return the share of ``|dL/dS|`` on selected keys, and of the best keys in as many places.

    ``dS = P * (dO V^T - rowsum)`` is the gradient of the scores under dense attention.
    """
    group = layer.query.shape[2] // layer.key.shape[2]
    row = torch.tensor(rows, device=layer.key.device)
    is_selected = selected_mask(index.per_head(layer.query.shape[2]), rows, seq_len=layer.key.shape[1])
    covered, best = [], []
    for head in range(layer.query.shape[2]):
        p = probabilities(layer, rows, head)
        grad_p = layer.grad_out[0, row, head].float() @ layer.value[0, :, head // group].float().T
        grad_scores = (p * (grad_p - (p * grad_p).sum(1, keepdim=True))).abs()
        total = grad_scores.sum(1).clamp_min(1e-30)
        mask = is_selected[head]
        covered.append(((grad_scores * mask).sum(1) / total).mean())
        ordered = grad_scores.sort(dim=1, descending=True).values.cumsum(1)
        count = (mask.sum(1, keepdim=True) - 1).clamp(min=0)
        best.append((ordered.gather(1, count)[:, 0] / total).mean())
    return {"selected keys": float(torch.stack(covered).mean()), "best keys": float(torch.stack(best).mean())}


@torch.no_grad()
def distance_fit(model: nn.Module, layer: Layer) -> dict[str, object]:
    """Compare the mean score by distance with what the mean query and key give under rotary embedding.

    The mean query and key before rotation give ``sum_j |q_j| |k_j| cos(theta_j d + phi_j)`` at distance ``d``. Where
    the measured means follow it, distances come from the embedding and the means alone, whatever the text.
    """
    seq_len, num_heads, dim = layer.query.shape[1:]
    group = num_heads // layer.key.shape[2]
    device = layer.key.device
    cos, sin = model.model.rotary_emb(layer.key.float(), torch.arange(seq_len, device=device)[None])
    scaling = model.model.rotary_emb.attention_scaling
    distances = torch.tensor([*range(1, 257), *(d for d in DISTANCES if 256 < d < seq_len // 2)], device=device)
    angle = distances[:, None] * torch.atan2(sin[0, 1], cos[0, 1])[: dim // 2].double()
    correlations, measured_means, predicted_means = [], [], []
    for head in range(num_heads):
        query, key = layer.query[0, :, head].float(), layer.key[0, :, head // group].float()
        measured = torch.stack([(query[d:] * key[: seq_len - d]).sum(1).mean() for d in distances.tolist()])
        means = [unrotated(each, cos[0], sin[0], scaling).mean(0).double() for each in (query, key)]
        (q_re, q_im), (k_re, k_im) = (each.split(dim // 2) for each in means)
        aligned, crossed = q_re * k_re + q_im * k_im, q_im * k_re - q_re * k_im
        predicted = ((angle.cos() * aligned - angle.sin() * crossed).sum(1) * scaling**2).float()
        correlations.append(torch.corrcoef(torch.stack([measured, predicted]))[0, 1])
        measured_means.append(measured)
        predicted_means.append(predicted)
    return {
        "correlation": float(torch.stack(correlations).mean()),
        "correlation_by_head": torch.stack(correlations).tolist(),
        "distance": distances.tolist(),
        "measured": torch.stack(measured_means).tolist(),
        "predicted": torch.stack(predicted_means).tolist(),
    }


def unrotated(tensor: Tensor, cos: Tensor, sin: Tensor, scaling: float) -> Tensor:
    """Undo rotary embedding of ``[seq, head_dim]``: halves rotate against each other; cos and sin carry ``scaling``."""
    first, second = tensor.chunk(2, dim=1)
    swapped = torch.cat([second, -first], dim=1)
    return (tensor * cos + swapped * sin) / scaling**2


def table(result: dict[str, object]) -> str:
    """Return the measurements, a line for each layer."""
    last = result["over_steps"][-1] if result["over_steps"] else None
    names = list(next(iter(result["mass"].values())))
    lines = [
        f"{result['length']} tokens; recall of the default selection at rows that it did not probe, in per cent",
        "layer  density  recall  of other text's  after steps: own, first  top columns  |dS| selected, best  rope r  "
        + "  ".join(names),
    ]
    for layer in result["layers"]:
        gradient = result["gradient"][layer]
        over = ("", "", "")
        if last is not None:
            over = (
                last["recall_of_own_index"][layer],
                last["recall_of_first_index"][layer],
                last["top_columns"][layer],
            )
        cells = [
            result["density"][layer],
            result["recall"][layer],
            result["recall_of_other_text"][layer],
            *over,
            gradient["selected keys"],
            gradient["best keys"],
            result["distances"][layer]["correlation"],
            *result["mass"][layer].values(),
        ]
        lines.append(f"{layer:5}  " + "  ".join(f"{100 * cell:6.1f}" if cell != "" else "" for cell in cells))
    return "\n".join(lines)


def figure(result: dict[str, object], path: Path) -> None:
    """Draw mean scores by distance, measured and predicted, and recall over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    layers = result["layers"]
    fig, axes = plt.subplots(1, 3, figsize=(16, 4.5))
    for i, layer in enumerate(layers):
        fit = result["distances"][layer]
        if i < 4:
            axes[0].plot(fit["distance"], fit["measured"][0], color=f"C{i}", label=f"layer {layer}")
            axes[0].plot(fit["distance"], fit["predicted"][0], color=f"C{i}", linestyle="--")
        steps = [0, *(each["step"] for each in result["over_steps"])]
        recalls = [each["recall_of_first_index"][layer] for each in result["over_steps"]]
        axes[1].plot(steps, [result["recall"][layer], *recalls], color=f"C{i}", label=f"layer {layer}")
    axes[0].set(xscale="log", xlabel="distance", title="mean score of head 0; dashed: from the mean query and key")
    axes[1].set(xlabel="training step", title="recall of the index of step 0", ylim=(0, 1.02))
    axes[2].bar([str(layer) for layer in layers], [result["gradient"][layer]["selected keys"] for layer in layers])
    axes[2].set(xlabel="layer", title="share of |dL/dS| on selected keys", ylim=(0, 1.02))
    for each in axes[:2]:
        each.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)
