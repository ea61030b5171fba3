"""Loss on held-out documents: with dense attention and with the run's own, by position and on a second copy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_mtraining import MTrainingConfig, hf
from megatron_mtraining.metrics import held_out_rows

from .losses import autocast, token_losses
from .runs import config_of_run

NUM_BUCKETS = 8
"""Equal parts of a document whose losses are told apart."""

NUM_ROWS = 64
"""Rows whose recall is measured."""

DENSE = MTrainingConfig(pattern="dense")


@torch.no_grad()
def evaluate(model: nn.Module, documents: Tensor, *, own: MTrainingConfig) -> dict[str, object]:
    """Measure a trained model.

    Args:
        model: configured by :func:`megatron_mtraining.hf.configure`; left with its own attention.
        documents: int64 ``[count, length]``.
        own: attention of the training run. A dense one is measured with the default as well: trained dense, used
            sparse.

    Returns:
        ``held_out``: for the attention ``dense`` and ``own`` (or ``default``) the loss in nats a token, the losses of
        equal parts of the documents, and the loss on the second copy of a text that fills half the length;
        ``recall_by_layer`` and ``inference_density_by_layer``: of that sparse attention on the first document.
    """
    model.eval()
    documents = documents.to(next(model.parameters()).device)
    name, sparse = ("default", config_of_run("default")) if own.pattern == "dense" else ("own", own)
    measured = {}
    for attention, config in (("dense", DENSE), (name, sparse)):
        hf.configure(model, config)
        measured[attention] = _losses(model, documents)
    length = documents.shape[1]
    rows = held_out_rows(sparse, seq_len=length, count=NUM_ROWS, first=length // 4)
    metrics = hf.LayerMetrics(rows or (length - 1,))  # every row of a short text is probed
    with autocast(str(documents.device)), hf.observe(metrics):
        model.model(input_ids=documents[:1], use_cache=False)
    hf.configure(model, own)
    return {
        "held_out": measured,
        "recall_by_layer": [float(heads.mean()) for heads in metrics.recall.values()],
        "inference_density_by_layer": list(metrics.density.values()),
    }


def _losses(model: nn.Module, documents: Tensor) -> dict[str, object]:
    length = documents.shape[1]
    with autocast(str(documents.device)):
        losses = torch.stack([token_losses(model, document) for document in documents])
        half = length // 2
        copied = [token_losses(model, document[:half].repeat(2))[half:].mean() for document in documents]
    parts = losses.mean(0).tensor_split(NUM_BUCKETS)
    return {
        "loss": float(losses.mean()),
        "loss_by_document": losses.mean(1).tolist(),
        "loss_by_position": [float(part.mean()) for part in parts],
        "second_copy": float(torch.stack(copied).mean()),
    }
