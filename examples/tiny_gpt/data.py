"""Real text as bytes: a stream to train on, a stream that is held out, and batches of either."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
HELD_OUT_EVERY = 16
"""One file in this many is held out."""

SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Text:
    """Two streams of bytes, uint8, on the CPU; no file is in both."""

    training: Tensor
    held_out: Tensor


def load_text(source: Path | None, *, longest_sequence: int) -> Text:
    """Reads ``source``, a file or all files of a folder, or by default the source files of this Python installation.

    Raises:
        SystemExit: there is less text than two sequences of ``longest_sequence`` tokens on either side.
    """
    documents = [path.read_bytes() for path in _files(source)]
    if len(documents) >= HELD_OUT_EVERY:
        held_out = b"\n".join(documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        training = b"\n".join(text for i, text in enumerate(documents) if (i + 1) % HELD_OUT_EVERY)
    else:
        whole = b"\n".join(documents)
        cut = len(whole) - len(whole) // HELD_OUT_EVERY
        training, held_out = whole[:cut], whole[cut:]
    shortest = min(len(training), len(held_out))
    if shortest < 2 * longest_sequence:
        raise SystemExit(
            f"--data must be at least {2 * longest_sequence} bytes to train on and as many held out "
            f"(one file in {HELD_OUT_EVERY}, or that share of the end), got {len(training)} and {len(held_out)}. "
            "Give more text, or a smaller --seq-len."
        )
    return Text(*(torch.frombuffer(bytearray(stream), dtype=torch.uint8) for stream in (training, held_out)))


def _files(source: Path | None) -> list[Path]:
    """The files to read, in an order that depends on their names only."""
    if source is not None and source.is_file():
        return [source]
    root = source or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise SystemExit(f"--data must be a file or a folder, got {root}. Name one that exists.")
    paths = []
    for folder, subfolders, names in os.walk(root):
        # Pruned here: an installation's site-packages holds more files than all the rest.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in names if source or name.endswith(".py")]
    return sorted(paths)


def batch_of(stream: Tensor, *, batch_size: int, seq_len: int, seed: int) -> dict[str, Tensor]:
    """``batch_size`` windows of ``stream`` at random places, the same on every rank: Megatron's four batch tensors.

    Returns:
        ``tokens``, ``labels``, ``position_ids`` int64 and ``loss_mask`` float32, each ``[batch_size, seq_len]``.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(stream) - seq_len, (batch_size, 1), generator=generator)
    windows = stream[starts + torch.arange(seq_len + 1)].long()
    return {
        "tokens": windows[:, :-1].contiguous(),
        "labels": windows[:, 1:].contiguous(),
        "loss_mask": torch.ones(batch_size, seq_len),
        "position_ids": torch.arange(seq_len).expand(batch_size, -1).contiguous(),
    }
