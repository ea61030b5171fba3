"""Documents of a fetched folder: token numbers of one text, cut into documents of one length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_mtraining.errors import invalid


def training_documents(cache: Path, name: str, *, length: int, count: int, seed: int) -> Tensor:
    """Return ``[count, length]`` int64 documents of a text, in an order drawn with ``seed``; none repeats.

    Raises:
        ValueError: there is no such text, or it is too short.
    """
    tokens = _load(cache, name)
    available = len(tokens) // length
    if available < count:
        rule = f"of at least {count} documents of {length} tokens"
        raise invalid("--texts", rule, f"{name}: {available}", "Lower --steps or --length, or fetch more --tokens.")
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:count]
    documents = np.stack([tokens[i * length : (i + 1) * length] for i in order.tolist()]) if count else tokens[:0]
    return torch.from_numpy(documents.astype(np.int64)).view(count, length)


def held_out_documents(cache: Path, *, length: int, count: int) -> Tensor:
    """Return ``[count, length]`` int64 documents that are in no training text.

    Raises:
        ValueError: there are fewer, or they are shorter.
    """
    documents = _load(cache, "held_out")
    if len(documents) < count or documents.shape[1] < length:
        raise invalid("texts/held_out.npy", f"of at least {count} documents of {length} tokens", documents.shape)
    return torch.from_numpy(documents[:count, :length].astype(np.int64))


def _load(cache: Path, name: str) -> np.ndarray:
    path = cache / "texts" / f"{name}.npy"
    if not path.exists():
        remedy = f"Run: python -m examples.real_model fetch --cache {cache}"
        raise invalid("--cache", f"a folder with texts/{name}.npy", cache, remedy)
    return np.load(path, mmap_mode="r")
