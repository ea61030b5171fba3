"""Synthetic indices: distances and columns drawn uniformly, in runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import invalid
from ...types import VerticalSlashIndex

BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class IndexShape:
    """Numbers of distances and columns of each list, and their runs."""

    distances: int = 128
    """Slash distances of a head, the local ones included."""

    local: int = 8
    """Number of local distances, 0 to ``local - 1``, which every head has."""

    verticals: int = 1152
    """Vertical columns of a head, the sinks included."""

    sinks: int = 128
    """Leading columns, which every head has."""

    run: int = 1
    """Neighbours in a run of the others: 1 leaves every distance and column isolated."""

    def __post_init__(self) -> None:
        for flag, least in (("local", 1), ("sinks", 0), ("run", 1)):
            if getattr(self, flag) < least:
                raise invalid(f"--{flag}", f"at least {least}", getattr(self, flag))
        for flag, part in (("distances", "local"), ("verticals", "sinks")):
            if getattr(self, flag) < getattr(self, part):
                raise invalid(f"--{flag}", f"at least --{part} {getattr(self, part)}", getattr(self, flag))


def synthetic_index(
    shape: IndexShape, *, seq_len: int, num_lists: int, rows: int = 1, seed: int = 0, device: torch.device | str = "cpu"
) -> VerticalSlashIndex:
    """Draw distances and columns for every batch row and list, uniformly as runs that do not touch.

    Raises:
        ValueError: that many runs do not fit into the sequence.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    num_blocks = -(-seq_len // BLOCK)

    def lists(flag: str, always: int, count: int, stop: int) -> list[list[list[int]]]:
        return [
            [_always_and_runs(flag, always, count, stop, shape.run, generator) for _ in range(num_lists)]
            for _ in range(rows)
        ]

    vertical = lists("--verticals", shape.sinks, shape.verticals, seq_len)
    slash = lists("--distances", shape.local, shape.distances, num_blocks)
    return VerticalSlashIndex.from_lists(vertical, slash, seq_len=seq_len, block_size=BLOCK, device=device)


def _always_and_runs(flag: str, always: int, count: int, stop: int, run: int, generator: torch.Generator) -> list[int]:
    if count == stop:
        return list(range(stop))
    if -(-(count - always) // run) > most_runs(always, stop, run):
        raise invalid(flag, f"fewer for runs of {run} to fit into {stop}", count, "Lower it, or give a longer --seq.")
    return [*range(always), *disjoint_runs(count - always, run=run, start=always + 1, stop=stop, generator=generator)]


def most_runs(always: int, stop: int, run: int) -> int:
    """Return the most runs, each with a gap before it, that fit between ``always`` and ``stop``."""
    return (stop - always) // (run + 1)


def disjoint_runs(count: int, *, run: int, start: int, stop: int, generator: torch.Generator) -> list[int]:
    """Draw ``count`` integers from ``start`` to ``stop - 1``, ascending, in runs of ``run`` with a gap between any two.

    All such sets are equally likely: the positions left between runs are drawn without return, then the runs are laid
    in between them. The last run is cut where ``run`` does not divide ``count``.
    """
    num_runs = -(-count // run)
    positions = torch.randperm(stop - start - num_runs * run + 1, generator=generator)[:num_runs].sort().values
    first = start + positions + torch.arange(num_runs, device="cpu") * run
    return (first[:, None] + torch.arange(run, device="cpu")).flatten()[:count].tolist()
