"""Dense attention as an index: every distance of every document."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..request import AttentionRequest
from ..tensors import cached_tensors, to_device
from ..types import VerticalSlashIndex


def prepare(request: AttentionRequest) -> Callable[[], Callable[[], VerticalSlashIndex]]:
    """Return the selection of every causal pair."""
    return lambda: lambda: every_key(request)


def every_distance(request: AttentionRequest, widths: tuple[int, int], *, num_lists: int = 0) -> VerticalSlashIndex:
    """Return one row for each span of a request, with every distance that the span reaches and no vertical.

    A span longer than ``dense_below`` may reach more than a list holds; its row is there to be overwritten.

    Args:
        request: the call; its padding counts for nothing.
        widths: entries in a list of verticals and in one of distances.
        num_lists: of a row; default those of the request.
    """
    vertical_width, slash_width = widths
    size, seq_len, device = request.config.block_size, request.layout.seq_len, request.query.device
    count = to_device(_reaches(request.spans, size).clamp(max=slash_width), device)
    distance = torch.arange(slash_width, dtype=torch.int32, device=device)
    slash = distance.where(distance < count[:, None], -(-seq_len // size))
    num_lists = num_lists or request.num_lists
    shape = (len(request.spans), num_lists)
    return VerticalSlashIndex(
        torch.full((*shape, vertical_width), seq_len, dtype=torch.int32, device=device),
        torch.zeros(shape, dtype=torch.int32, device=device),
        slash[:, None].repeat(1, num_lists, 1),
        count[:, None].repeat(1, num_lists),
        block_size=size,
    )


def every_key(request: AttentionRequest) -> VerticalSlashIndex:
    """Return the index of every causal pair, one list in memory for all rows and heads; for padding, distance 0."""
    size, seq_len, device = request.config.block_size, request.layout.seq_len, request.query.device
    if request.num_valid is None or 0 not in request.num_valid:
        sizes = {"num_heads": request.num_lists, "seq_len": seq_len, "block_size": size, "device": device}
        return VerticalSlashIndex.dense(rows=len(request.spans), **sizes)
    widths = (1, max(blocks_touched(*span, size) for span in request.spans))
    one = every_distance(request, widths, num_lists=1)
    return one.rebuild(*(table.expand(-1, request.num_lists, *table.shape[2:]) for table in one.tensors))


def blocks_touched(start: int, stop: int, block_size: int) -> int:
    """Return the number of blocks that tokens ``start`` to ``stop - 1`` lie in; 1 for an empty span."""
    return max(stop - 1, start) // block_size - start // block_size + 1


@cached_tensors(maxsize=8)
def _reaches(spans: tuple[tuple[int, int], ...], block_size: int) -> Tensor:
    """int32 ``[spans]``, on the CPU: number of blocks each lies in."""
    reached = [blocks_touched(start, stop, block_size) for start, stop in spans]
    return torch.tensor(reached, dtype=torch.int32, device="cpu")
