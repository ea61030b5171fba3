"""A plan as the tables of integers that the selection kernels read (csrc/probe_params.h), on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..config import MTrainingConfig
from ..layout import SequenceLayout
from ..layout.blocks import blocks_of
from ..tensors import kept_tensors, to_device
from .plan import EstimatedDocument, plan_documents
from .shards import owned_rows
from .task import SelectionTask
from .valid_rows import Spans

TILE_ROWS = 8
"""Probe rows in a tile, all of one query block."""

_NO_POSITION = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTables:
    """Tables of one plan on one rank; int32 unless said otherwise, in the order of the plan's documents."""

    documents: Tensor
    """``[documents, 16]``: ``ProbeDocument``."""

    row_tiles: Tensor
    """``[row tiles, 8]``: ``RowTile``."""

    key_tiles: Tensor
    """``[key tiles, 4]``: ``KeyTile``."""

    positions: Tensor
    """``[probe rows]``: global."""

    group_blocks: Tensor
    """``[row groups]``: query block, counted from the document's first."""

    block_order: Tensor
    """``[blocks]``: every document's ``block_order``."""

    local_rows: Tensor
    """int64: the probe rows that this rank holds, among its tokens."""

    owned_rows: Tensor
    """int64: their places among all probe rows."""

    most_row_tiles: int
    """Of a document."""

    most_blocks: int
    """Of a document."""

    mass_blocks: int
    """Blocks of mass that a lane sends to the rank which ranks it, over all row groups and documents."""

    @property
    def num_probe_rows(self) -> int:
        """Rows of all documents."""
        return self.positions.numel()


def probe_tables(task: SelectionTask) -> ProbeTables:
    """The tables of ``task`` on its device, kept for the next layers; the host does not wait."""
    return _tables(*_plan_of(task), task.query.device)


def most_row_tiles(task: SelectionTask) -> int:
    """Row tiles of the document that has most, kept likewise."""
    return _most_row_tiles(*_plan_of(task))


def _plan_of(task: SelectionTask) -> tuple[MTrainingConfig, SequenceLayout, int, int, Spans]:
    """What ``plan_documents`` was asked."""
    shards = task.shards
    return task.config, shards.layout, shards.transport.rank, task.query.shape[0], task.spans


@lru_cache(maxsize=8)
def _most_row_tiles(config: MTrainingConfig, layout: SequenceLayout, cp_rank: int, batch: int, spans: Spans) -> int:
    return max(map(_num_row_tiles, plan_documents(config, layout, cp_rank, batch, spans)))


def _num_row_tiles(document: EstimatedDocument) -> int:
    """Row tiles of one document: up to 8 rows of one query block each, and an even number of them."""
    tiles = sum(-(-(rows.stop - rows.start) // TILE_ROWS) for _, rows in document.row_groups)
    return tiles + tiles % 2


@kept_tensors(maxsize=8)  # as many plans as plan_documents keeps
def _tables(
    config: MTrainingConfig,
    layout: SequenceLayout,
    cp_rank: int,
    batch: int,
    spans: Spans,
    device: torch.device,
) -> ProbeTables:
    planned = plan_documents(config, layout, cp_rank, batch, spans)
    blocks = blocks_of(layout, cp_rank)
    key_tiles = [_key_tiles(document, blocks, layout.block_size) for document in planned]
    all_rows = tuple(row for document in planned for row in document.probe_rows)
    owned, local = owned_rows(layout, cp_rank, all_rows)
    host = {
        "documents": _documents(planned, [len(tiles) for tiles in key_tiles], layout.block_size),
        "row_tiles": torch.tensor([tile for document in planned for tile in _row_tiles(document)], device="cpu"),
        "key_tiles": torch.cat(key_tiles),
        "positions": torch.tensor(all_rows, device="cpu"),
        "group_blocks": torch.tensor([block for document in planned for block, _ in document.row_groups], device="cpu"),
        "block_order": torch.cat([document.block_order for document in planned]),
    }
    tables = {name: to_device(table.int(), device) for name, table in host.items()}
    tables |= {"local_rows": to_device(local, device), "owned_rows": to_device(owned, device)}
    return ProbeTables(
        **tables,
        most_row_tiles=_most_row_tiles(config, layout, cp_rank, batch, spans),
        most_blocks=max(document.num_blocks for document in planned),
        mass_blocks=sum(len(document.row_groups) * document.slots_per_rank for document in planned),
    )


def _documents(planned: tuple[EstimatedDocument, ...], num_key_tiles: list[int], block_size: int) -> Tensor:
    """``[documents, 16]``; the sums that run from document to document start at 0."""
    table, row_tile, group, key_tile, mass_block, order_block = [], 0, 0, 0, 0, 0
    for document, tiles in zip(planned, num_key_tiles, strict=True):
        num_groups, own_row_tiles = len(document.row_groups), _num_row_tiles(document)
        table.append(
            (
                *(document.start, document.stop, document.first_block, document.num_blocks),
                *(document.probes.start, len(document.probe_rows), row_tile, own_row_tiles, group, num_groups),
                (document.local_tokens.start - document.local_offset) // block_size,
                *(document.slots_per_rank, key_tile, key_tile + tiles, mass_block, order_block),
            )
        )
        row_tile += own_row_tiles
        group += num_groups
        key_tile += tiles
        mass_block += num_groups * document.slots_per_rank
        order_block += document.num_blocks
    return torch.tensor(table, device="cpu")


def _row_tiles(document: EstimatedDocument) -> list[tuple[int, ...]]:
    """The document's row tiles; the last one of a group ends it, an empty one where their number would be odd."""
    tiles = []
    for group, (block, rows) in enumerate(document.row_groups):
        for first in range(rows.start, rows.stop, TILE_ROWS):
            count = min(TILE_ROWS, rows.stop - first)
            positions = document.probe_rows[first], document.probe_rows[first + count - 1]
            ends_group = first + count == rows.stop
            query_block = document.first_block + block
            tiles.append((document.probes.start + first, count, group, int(ends_group), query_block, *positions, 0))
    if len(tiles) % 2:
        last = tiles[-1]
        tiles[-1] = (*last[:3], 0, *last[4:])
        tiles.append((0, 0, last[2], 1, last[4], _NO_POSITION, -1, 0))
    return tiles


def _key_tiles(document: EstimatedDocument, blocks: Tensor, block_size: int) -> Tensor:
    """int64 ``[key tiles, 4]``: the slots that hold the document's tokens, and which of their rows do."""
    low, high = document.local_tokens.start, document.local_tokens.stop
    slot = torch.arange(low // block_size, -(-high // block_size) if high > low else low // block_size, device="cpu")
    begin, end = low - slot * block_size, high - slot * block_size
    return torch.stack((slot, blocks[slot], begin.clamp(min=0), end.clamp(max=block_size)), dim=1)
