"""Cross entropy of long texts, in chunks: logits of 65536 tokens over 49152 words would take 13 GB."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 4096
"""Tokens whose logits exist at a time."""


def autocast(device: str) -> AbstractContextManager:
    """Return the precision of a pass: bfloat16 products of float32 weights on a GPU; float32 on a CPU."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


def hidden_states(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return ``[tokens, hidden]``, the last layer's output for one document."""
    return model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return ``[tokens - 1]`` float32: nats of each token after the first; with gradients where they are enabled."""
    hidden, labels = hidden_states(model, tokens)[:-1], tokens[1:]
    parts = []
    for chunk in range(0, len(labels), CHUNK):
        here = slice(chunk, chunk + CHUNK)
        parts.append(checkpoint(_losses, hidden[here], model.lm_head.weight, labels[here], use_reentrant=False))
    return torch.cat(parts)


def _losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")
