"""Plan as the tables of integers that the selection kernels read (csrc/probe_params.h), on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import BUDGETS, MTrainingConfig
from ..layout import SequenceLayout, blocks_of
from ..request import Spans, owned_rows
from ..tensors import cached_tensors, to_device
from .budget import LEAST_ROW_GROUPS, Cost
from .estimators import EstimatedDocument, SelectionRequest, estimated_documents

TILE_ROWS = 64
"""Probe rows that are multiplied together."""

UNIT_ROWS = 8
"""Neighbours of these, of one query block each; what a unit lacks is padding, and so are units that a tile lacks."""

_PADDING = -1
"""The position of a row that is padding."""

_NO_BLOCK = -(2**30)
"""The query block of a unit that is padding: before every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTables:
    """Tables of the estimated documents on one rank; int32 unless said otherwise, in the order of the documents."""

    documents: Tensor
    """``[documents, 13]``: ``ProbeDocument``."""

    row_tiles: Tensor
    """``[row tiles, 4]``: ``RowTile``."""

    key_tiles: Tensor
    """``[key tiles, 4]``: ``KeyTile``."""

    positions: Tensor
    """``[padded rows]``: global; -1 for padding."""

    unit_blocks: Tensor
    """``[padded rows / 8]``: global query block."""

    block_order: Tensor
    """``[blocks]``: every document's ``block_order``."""

    visible_rows: Tensor
    """``[blocks]``: of every document, its probe rows that see a distance, or a key of a block; at least 1."""

    local_rows: Tensor
    """int64: the padded rows that this rank holds, among its tokens; padding is the row before it once more."""

    owned_rows: Tensor
    """int64: their places among the padded rows."""

    seen_key_tiles: tuple[tuple[int, ...], ...]
    """Of every document, of every row tile: the key tiles that a row of it sees, the first so many of this rank's."""

    num_halves: int
    """Values that ranks exchange of a key: 2 where columns compete with the mass of one half of the probe rows."""

    most_row_tiles: int
    """Most row tiles of a document."""

    most_key_tiles: int
    """Most key tiles of a document, on this rank."""

    most_blocks: int
    """Most blocks of a document."""

    mass_blocks: int
    """Blocks of mass that a list sends to the rank which chooses it, over all documents."""

    @property
    def num_probe_rows(self) -> int:
        """Rows of all documents, padding included."""
        return self.positions.numel()


def probe_tables(request: SelectionRequest) -> ProbeTables:
    """Return the tables of ``request`` on its device, kept for the next layers; the host does not wait."""
    return _tables(*_given(request), request.query.device)


def _given(request: SelectionRequest) -> tuple[MTrainingConfig, SequenceLayout, int, int, Spans]:
    """Return the arguments of ``estimated_documents``."""
    shards = request.shards
    return request.config, shards.layout, shards.transport.rank, request.query.shape[0], request.estimated_spans


@cached_tensors(maxsize=8)  # as many as estimated_documents
def _tables(
    config: MTrainingConfig,
    layout: SequenceLayout,
    cp_rank: int,
    batch: int,
    spans: Spans,
    device: torch.device,
) -> ProbeTables:
    estimated = estimated_documents(config, layout, cp_rank, batch, spans)
    blocks = blocks_of(layout, cp_rank)
    key_tiles = [_key_tiles(document, blocks, layout.block_size) for document in estimated]
    num_halves = 2 if isinstance(BUDGETS.get(config.budget), Cost) and config.target_recall < 1.0 else 1
    halves = [num_halves if len(document.row_groups) >= LEAST_ROW_GROUPS else 1 for document in estimated]
    rows = [_padded_rows(*each) for each in zip(estimated, halves, strict=True)]
    positions = torch.cat([of_document for of_document, _ in rows])
    # Padding repeats the row before it in the table: a weight of 0 would not hide a NaN of another row.
    repeated = torch.arange(len(positions), device="cpu").where(positions != _PADDING, 0).cummax(dim=0).values
    owned, local = owned_rows(layout, cp_rank, tuple(positions[repeated].tolist()))
    row_tiles = [_row_tiles(*each, document) for each, document in zip(rows, estimated, strict=True)]
    host = {
        "documents": _documents(estimated, rows, halves, [len(tiles) for tiles in key_tiles], layout.block_size),
        "row_tiles": torch.cat(row_tiles),
        "key_tiles": torch.cat(key_tiles),
        "positions": positions,
        "unit_blocks": torch.cat([of_document for _, of_document in rows]),
        "block_order": torch.cat([document.block_order for document in estimated]),
        "visible_rows": torch.cat([document.visible.clamp(min=1) for document in estimated]),
    }
    tables = {name: to_device(table.int(), device) for name, table in host.items()}
    tables |= {"local_rows": to_device(local, device), "owned_rows": to_device(owned, device)}
    return ProbeTables(
        **tables,
        seen_key_tiles=tuple(
            tuple(torch.searchsorted(keys[:, 1].contiguous(), of_rows[:, 1] // layout.block_size, right=True).tolist())
            for keys, of_rows in zip(key_tiles, row_tiles, strict=True)
        ),
        num_halves=num_halves,
        most_row_tiles=max(len(of_document) for of_document, _ in rows) // TILE_ROWS,
        most_key_tiles=max(map(len, key_tiles)),
        most_blocks=max(document.num_blocks for document in estimated),
        mass_blocks=sum(document.slots_per_rank for document in estimated),
    )


def _documents(
    estimated: tuple[EstimatedDocument, ...],
    rows: list[tuple[Tensor, Tensor]],
    halves: list[int],
    num_key_tiles: list[int],
    block_size: int,
) -> Tensor:
    """``[documents, 13]``; the sums that run from document to document start at 0."""
    table, row_tile, key_tile, mass_block, order_block = [], 0, 0, 0, 0
    for document, (positions, _), num_halves, tiles in zip(estimated, rows, halves, num_key_tiles, strict=True):
        own_row_tiles = len(positions) // TILE_ROWS
        table.append(
            (
                *(document.start, document.stop, document.first_block, document.num_blocks, row_tile, own_row_tiles),
                (document.local_tokens.start - document.local_offset) // block_size,
                *(document.slots_per_rank, key_tile, key_tile + tiles, mass_block, order_block, num_halves),
            )
        )
        row_tile += own_row_tiles
        key_tile += tiles
        mass_block += document.slots_per_rank
        order_block += document.num_blocks
    return torch.tensor(table, device="cpu")


def _padded_rows(document: EstimatedDocument, num_halves: int) -> tuple[Tensor, Tensor]:
    """int64: the positions of a document's probe rows, those of each query block padded to units and the whole to
    tiles, and the block of each unit. Every other query block has the first half of a tile where there are two."""
    of_tile = TILE_ROWS // num_halves
    positions: list[list[int]] = [[] for _ in range(num_halves)]
    unit_blocks: list[list[int]] = [[] for _ in range(num_halves)]
    for number, (block, rows) in enumerate(document.row_groups):
        half, units = number % num_halves, -(-(rows.stop - rows.start) // UNIT_ROWS)
        positions[half] += document.probe_rows[rows]
        positions[half] += [_PADDING] * (units * UNIT_ROWS - (rows.stop - rows.start))
        unit_blocks[half] += [document.first_block + block] * units
    num_tiles = -(-max(map(len, positions)) // of_tile)
    for of_rows, of_units in zip(positions, unit_blocks, strict=True):
        of_rows += [_PADDING] * (num_tiles * of_tile - len(of_rows))
        of_units += [_NO_BLOCK] * (num_tiles * of_tile // UNIT_ROWS - len(of_units))
    tables = (torch.tensor(table, device="cpu") for table in (positions, unit_blocks))
    by_position, by_unit = (table.view(num_halves, num_tiles, -1).transpose(0, 1).flatten() for table in tables)
    return by_position, by_unit


def _row_tiles(positions: Tensor, unit_blocks: Tensor, document: EstimatedDocument) -> Tensor:
    """int64 ``[row tiles, 4]`` of one document: no tile is all padding."""
    of_tiles = positions.view(-1, TILE_ROWS)
    first = of_tiles.where(of_tiles != _PADDING, document.stop).amin(dim=1)
    last_block = unit_blocks.view(len(of_tiles), -1).amax(dim=1)
    return torch.stack(
        (first, of_tiles.amax(dim=1), last_block, torch.full_like(first, len(document.probe_rows))), dim=1
    )


def _key_tiles(document: EstimatedDocument, blocks: Tensor, block_size: int) -> Tensor:
    """int64 ``[key tiles, 4]``: slots that hold the document's tokens, and their rows that do."""
    low, high = document.local_tokens.start, document.local_tokens.stop
    slot = torch.arange(low // block_size, -(-high // block_size) if high > low else low // block_size, device="cpu")
    begin, end = low - slot * block_size, high - slot * block_size
    return torch.stack((slot, blocks[slot], begin.clamp(min=0), end.clamp(max=block_size)), dim=1)
