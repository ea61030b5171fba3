"""Index sets to measure on: random ones, clustered ones, ones of a given density."""

from __future__ import annotations

from dataclasses import replace

from megatron_mtraining.commands.balance import synthetic
from megatron_mtraining.commands.balance.synthetic import BLOCK, IndexShape, most_runs
from megatron_mtraining.errors import invalid
from megatron_mtraining.metrics import density
from megatron_mtraining.types import VerticalSlashIndex

from .problem import Problem


def synthetic_index(problem: Problem, shape: IndexShape) -> VerticalSlashIndex:
    """Draw an index for ``problem``; see :func:`megatron_mtraining.commands.balance.synthetic.synthetic_index`."""
    sizes = {"seq_len": problem.seq_len, "num_lists": problem.num_lists, "rows": problem.batch}
    return synthetic.synthetic_index(shape, **sizes, seed=problem.seed, device=problem.device)


def index_of_density(problem: Problem, shape: IndexShape, target: float) -> VerticalSlashIndex:
    """Call :func:`synthetic_index` with the most distances of at most ``target`` per cent; columns by ``shape``.

    Raises:
        ValueError: the columns and local distances alone exceed it, or that many distances do not fit.
    """
    if not 0.0 < target <= 100.0:
        raise invalid("--densities", "percentages in (0, 100]", target)
    num_blocks = -(-problem.seq_len // BLOCK)

    def percent(distances: int) -> float:
        index = synthetic_index(problem, replace(shape, distances=distances))
        return 100 * float(density(index, seq_len=problem.seq_len).mean())

    low, high = shape.local, shape.local + shape.run * most_runs(shape.local, num_blocks, shape.run)
    least, most = percent(low), percent(high)
    if not least <= target <= most:
        rule = f"between {least:.1f} and {most:.1f} for runs of {shape.run}"
        raise invalid("--densities", rule, target, "Change --verticals, or take longer runs.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if percent(middle) <= target else (low, middle)
    return synthetic_index(problem, replace(shape, distances=low))


def dense_index(problem: Problem) -> VerticalSlashIndex:
    """Return the index of every causal pair of ``problem``."""
    return VerticalSlashIndex.dense(
        rows=problem.batch, num_heads=problem.num_lists, seq_len=problem.seq_len, device=problem.device
    )
