"""Index sets to measure on: random ones, clustered ones, ones of a given density."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_mtraining.errors import invalid
from megatron_mtraining.metrics import density
from megatron_mtraining.types import VerticalSlashIndex

from .problem import Problem

BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class IndexShape:
    """Numbers of distances and columns that each list keeps, and their runs."""

    distances: int = 128
    """Slash distances of a head, the local ones included."""

    local: int = 8
    """Number of local distances, 0 to ``local - 1``, which every head keeps."""

    verticals: int = 1152
    """Vertical columns of a head, the sinks included."""

    sinks: int = 128
    """Leading columns, which every head keeps."""

    run: int = 1
    """Neighbours in a run of the others: 1 leaves every distance and column isolated."""

    def __post_init__(self) -> None:
        for flag, least in (("local", 1), ("sinks", 0), ("run", 1)):
            if getattr(self, flag) < least:
                raise invalid(f"--{flag}", f"at least {least}", getattr(self, flag))
        for flag, part in (("distances", "local"), ("verticals", "sinks")):
            if getattr(self, flag) < getattr(self, part):
                raise invalid(f"--{flag}", f"at least --{part} {getattr(self, part)}", getattr(self, flag))


def synthetic_index(problem: Problem, shape: IndexShape) -> VerticalSlashIndex:
    """Draw distances and columns for every batch row and list, uniformly as runs that do not touch.

    Raises:
        ValueError: that many runs do not fit into the sequence.
    """
    generator = torch.Generator().manual_seed(problem.seed + 1)
    num_blocks = -(-problem.seq_len // BLOCK)

    def lists(flag: str, always: int, count: int, stop: int) -> list[list[list[int]]]:
        return [
            [_always_and_runs(flag, always, count, stop, shape.run, generator) for _ in range(problem.num_lists)]
            for _ in range(problem.batch)
        ]

    vertical = lists("--verticals", shape.sinks, shape.verticals, problem.seq_len)
    slash = lists("--distances", shape.local, shape.distances, num_blocks)
    return VerticalSlashIndex.from_lists(
        vertical, slash, seq_len=problem.seq_len, block_size=BLOCK, device=problem.device
    )


def _always_and_runs(flag: str, always: int, count: int, stop: int, run: int, generator: torch.Generator) -> list[int]:
    if count == stop:
        return list(range(stop))
    if -(-(count - always) // run) > _most_runs(always, stop, run):
        raise invalid(flag, f"fewer for runs of {run} to fit into {stop}", count, "Lower it, or give a longer --seq.")
    return [*range(always), *disjoint_runs(count - always, run=run, start=always + 1, stop=stop, generator=generator)]


def _most_runs(always: int, stop: int, run: int) -> int:
    """Return the most runs, each with a gap before it, that fit between ``always`` and ``stop``."""
    return (stop - always) // (run + 1)


def disjoint_runs(count: int, *, run: int, start: int, stop: int, generator: torch.Generator) -> list[int]:
    """Draw ``count`` integers from ``start`` to ``stop - 1``, ascending, in runs of ``run`` with a gap between any two.

    All such sets are equally likely: the places left between runs are drawn without return, then the runs are laid
    in between them. The last run is cut where ``run`` does not divide ``count``.
    """
    num_runs = -(-count // run)
    places = torch.randperm(stop - start - num_runs * run + 1, generator=generator)[:num_runs].sort().values
    first = start + places + torch.arange(num_runs) * run
    return (first[:, None] + torch.arange(run)).flatten()[:count].tolist()


def index_of_density(problem: Problem, shape: IndexShape, target: float) -> VerticalSlashIndex:
    """Call :func:`synthetic_index` with the most distances that keep at most ``target`` per cent; columns by ``shape``.

    Raises:
        ValueError: the columns and local distances alone keep more, or that many distances do not fit.
    """
    if not 0.0 < target <= 100.0:
        raise invalid("--densities", "percentages in (0, 100]", target)
    num_blocks = -(-problem.seq_len // BLOCK)

    def kept(distances: int) -> float:
        index = synthetic_index(problem, replace(shape, distances=distances))
        return 100 * float(density(index, seq_len=problem.seq_len).mean())

    low, high = shape.local, shape.local + shape.run * _most_runs(shape.local, num_blocks, shape.run)
    least, most = kept(low), kept(high)
    if not least <= target <= most:
        rule = f"between {least:.1f} and {most:.1f} for runs of {shape.run}"
        raise invalid("--densities", rule, target, "Change --verticals, or take longer runs.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kept(middle) <= target else (low, middle)
    return synthetic_index(problem, replace(shape, distances=low))


def dense_index(problem: Problem) -> VerticalSlashIndex:
    """Return the index that keeps every causal pair of ``problem``."""
    return VerticalSlashIndex.dense(
        rows=problem.batch, num_heads=problem.num_lists, seq_len=problem.seq_len, device=problem.device
    )
