"""Lists of the index: their widths, the entries that are always in them, and the merging of chosen ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import MTrainingConfig
from ..request import AttentionRequest
from ..tensors import cached_tensors, to_device
from ..types import VerticalSlashIndex
from .budget import Selection


@lru_cache(maxsize=8)
def list_widths(config: MTrainingConfig, spans: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return the widths of ``vertical`` and ``slash`` that the caps allow in the longest document, at least 1.

    Packed verticals take this width for every document, so a pack of dense documents must not pay for the caps.
    """
    vertical = slash = 1
    for start, stop in spans:
        is_dense = stop - start <= config.dense_below
        reach = blocks_touched(start, stop, config.block_size)
        slash = max(slash, reach if is_dense else min(reach, config.local_blocks + config.max_slash))
        vertical = max(vertical, 0 if is_dense else min(stop - start, config.sink_tokens + config.max_vertical))
    return vertical, slash


def blocks_touched(start: int, stop: int, block_size: int) -> int:
    """Return the number of blocks that tokens ``start`` to ``stop - 1`` lie in; 1 for an empty span."""
    return max(stop - 1, start) // block_size - start // block_size + 1


@cached_tensors(maxsize=8)
def _reaches(spans: tuple[tuple[int, int], ...], block_size: int) -> Tensor:
    """int32 ``[spans]``, on the CPU: number of blocks each lies in."""
    reached = [blocks_touched(start, stop, block_size) for start, stop in spans]
    return torch.tensor(reached, dtype=torch.int32, device="cpu")


def merge_ascending(always: Tensor, selection: Selection, *, offset: int, width: int, padding: int) -> Tensor:
    """Merge ``always`` and the chosen items, ascending, each entry once: kernels would count it twice.

    Args:
        always: int64 ``[count]``, in every list.
        selection: ``[lanes, ...]``; what it chooses of ``always``, or again, changes nothing.
        offset: added to the items.
        width: entries in a list; no list has more.
        padding: larger than any entry.

    Returns:
        int32 ``[lanes, width + 1]``; the last entry is how many count.
    """
    lanes = selection.items.shape[0]
    chosen = (selection.items + offset).where(selection.chosen, padding)
    table = torch.cat((always.expand(lanes, -1), chosen), dim=1).sort(dim=1).values
    table[:, 1:].masked_fill_(table[:, 1:] == table[:, :-1], padding)
    count = (table < padding).sum(dim=1, keepdim=True)
    table = F.pad(table.sort(dim=1).values, (0, width - table.shape[1]), value=padding)
    return torch.cat((table, count), dim=1).int()


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


def index_of_lists(lists: Tensor, widths: tuple[int, int], *, num_lists: int, block_size: int) -> VerticalSlashIndex:
    """Return the index whose rows are ``lists`` ``[documents, all lists, entries]``; its tensors are views of these.

    Args:
        lists: int32: verticals and their count, slashes and their count.
        widths: entries in a list of verticals and in one of slashes.
        num_lists: of a row.
        block_size: of the index.
    """
    rows = lists.unflatten(1, (-1, num_lists)).flatten(0, 1)
    vertical, num_vertical, slash, num_slash = rows.split((widths[0], 1, widths[1], 1), dim=2)
    return VerticalSlashIndex(vertical, num_vertical[..., 0], slash, num_slash[..., 0], block_size=block_size)


def overwrite_rows(index: VerticalSlashIndex, rows: Sequence[int], values: VerticalSlashIndex) -> None:
    """Write the rows of ``values``, one after the other, to ``rows`` of ``index``, in place."""
    places = to_device(torch.tensor(rows, device="cpu"), index.device)
    for table, chosen in zip(index.tensors, values.tensors, strict=True):
        table.index_copy_(0, places, chosen)
