"""Expected density of caps on verticals and slashes, and a drawn index of that density."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..config import MTrainingConfig
from ..errors import invalid
from ..types import VerticalSlashIndex
from .density import density

_SAMPLED_HEADS = 8

_RUN = 16
"""Most neighbours in a run of a drawn index: selections choose runs, and these decide how even ranks are."""


def density_of_caps(seq_len: int, *, max_vertical: int, max_slash: int) -> float:
    """Return the density that a head is expected to have when both caps bind and no key stands out.

    Beside the sinks and local blocks of the default configuration come ``max_vertical`` columns drawn evenly, counted
    exactly for each of a few drawn heads, and ``max_slash`` distances drawn evenly from the M others: each pair not
    selected before is then selected with probability ``max_slash / M``.
    """
    index = drawn_index(seq_len, num_heads=_SAMPLED_HEADS, max_vertical=max_vertical, max_slash=0)
    without_slashes = density(index, seq_len=seq_len).mean().item()
    others = _other_distances(seq_len)
    return without_slashes + (1 - without_slashes) * (min(max_slash / others, 1.0) if others else 0.0)


def max_slash_for(seq_len: int, *, target_density: float, max_vertical: int) -> int:
    """Return the ``max_slash`` whose expected density is nearest to ``target_density``.

    Raises:
        ValueError: sinks, local blocks and verticals alone exceed it.
    """
    without_slashes = density_of_caps(seq_len, max_vertical=max_vertical, max_slash=0)
    if without_slashes > target_density:
        rule = f"at least {without_slashes:.4f}, the density of {max_vertical} verticals in {seq_len} tokens"
        raise invalid("density", rule, f"{target_density:g}", "Lower the number of verticals, or raise the density.")
    return round(_other_distances(seq_len) * (target_density - without_slashes) / (1 - without_slashes))


def drawn_index(
    seq_len: int, *, num_heads: int, max_vertical: int, max_slash: int, seed: int = 0
) -> VerticalSlashIndex:
    """Draw sinks and local blocks of the default configuration, and as many others of each as the caps allow, in runs.

    The sequence is cut into as many equal pieces as there are runs, with one drawn run in each; of two heads the second
    mirrors the first inside the pieces. So the density hardly depends on the draw.
    """
    config, generator = MTrainingConfig.algorithm_1(), torch.Generator().manual_seed(seed)

    def others(most: int, count: int) -> Iterator[list[int]]:
        num_runs = -(-most // _RUN)
        edges, ends = (torch.arange(num_runs + 1, device="cpu") * total // max(num_runs, 1) for total in (count, most))
        for head in range(num_heads):
            if head % 2 == 0:
                position = torch.rand(num_runs, dtype=torch.float64, generator=generator, device="cpu")
            room = (edges.diff() - ends.diff()) * (1 - position if head % 2 else position)
            runs = zip((edges[:-1] + room.long()).tolist(), ends.diff().tolist(), strict=True)
            yield [entry for first, length in runs for entry in range(first, first + length)]

    def lists(always: int, most: int, stop: int) -> list[list[int]]:
        always = min(always, stop)
        free = stop - always
        return [[*range(always), *(always + each for each in head)] for head in others(min(most, free), free)]

    num_blocks = -(-seq_len // config.block_size)
    vertical = lists(config.sink_tokens, max_vertical, seq_len)
    slash = lists(config.local_blocks, max_slash, num_blocks)
    return VerticalSlashIndex.from_lists([vertical], [slash], seq_len=seq_len, block_size=config.block_size)


def _other_distances(seq_len: int) -> int:
    """Block distances that are not local."""
    config = MTrainingConfig.algorithm_1()
    return max(-(-seq_len // config.block_size) - config.local_blocks, 0)
