"""A block geometry as the tables of integers that the kernels read (csrc/params.h), on the device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ...tensors import cached_tensors, to_device
from ..geometry import BlockGeometry, block_slots
from . import BLOCK_SIZE

TILE_INTS = 8  # slot, block, row_begin, row_end, index_row, first_token, end_token, 0


@dataclass(frozen=True, slots=True)
class DeviceGeometry:
    """Tables of one geometry; all int32, views of one buffer."""

    query_tiles: Tensor
    """``[num_query_tiles, 8]``: a query slot's rows of one document, for each of its documents; sorted by document and
    block."""

    key_tiles: Tensor
    """``[num_key_tiles, 8]``: likewise for the key slots."""

    query_slots: Tensor
    """``[num_blocks]``: slot of each global block among the queries, or -1."""

    key_slots: Tensor
    """``[num_blocks]``: slot of each global block among the keys, or -1."""

    document_tiles: Tensor
    """``[documents + 1]``: first query tile of each document; one document when the geometry has none."""

    @property
    def num_documents(self) -> int:
        """Documents of the geometry, 1 where it has none."""
        return self.document_tiles.numel() - 1


def device_geometry(geometry: BlockGeometry, device: torch.device) -> DeviceGeometry:
    """Return the tables of ``geometry`` on ``device``, made once for each distinct geometry; the host does not wait."""
    bounds = None if geometry.documents is None else geometry.documents.bounds
    return _known_tables(geometry.seq_len, bounds, geometry.query_blocks, geometry.key_blocks, device)


@cached_tensors(maxsize=256)  # a ring has one geometry for each step, packed documents one for each batch
def _known_tables(
    seq_len: int, bounds: tuple[int, ...] | None, query_blocks: Tensor, key_blocks: Tensor, device: torch.device
) -> DeviceGeometry:
    """Find the blocks by identity, which costs nothing where there are many; the cache keeps them alive for it."""
    return _tables(seq_len, bounds, _bytes(query_blocks), _bytes(key_blocks), device)


def _bytes(blocks: Tensor) -> bytes:
    """Return the content of a CPU tensor: what makes two geometries the same."""
    blocks = blocks.contiguous()
    return ctypes.string_at(blocks.data_ptr(), blocks.numel() * blocks.element_size())


@cached_tensors(maxsize=256)
def _tables(
    seq_len: int, bounds: tuple[int, ...] | None, query_bytes: bytes, key_bytes: bytes, device: torch.device
) -> DeviceGeometry:
    num_blocks = -(-seq_len // BLOCK_SIZE)
    query_blocks, key_blocks = (torch.frombuffer(bytearray(b), dtype=torch.int64) for b in (query_bytes, key_bytes))
    query_tiles, key_tiles = (_tiles(blocks, seq_len, bounds) for blocks in (query_blocks, key_blocks))
    num_documents = 1 if bounds is None else len(bounds) - 1
    counts = torch.bincount(query_tiles[:, 4], minlength=num_documents)
    parts = [
        query_tiles.flatten(),
        key_tiles.flatten(),
        *(block_slots(blocks, num_blocks, blocks.device)[:-1] for blocks in (query_blocks, key_blocks)),
        torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
    ]
    host = torch.cat([part.int() for part in parts])
    views = to_device(host, device).split([part.numel() for part in parts])
    return DeviceGeometry(views[0].view(-1, TILE_INTS), views[1].view(-1, TILE_INTS), *views[2:])


def _tiles(blocks: Tensor, seq_len: int, bounds: tuple[int, ...] | None) -> Tensor:
    """int64 ``[tiles, 8]``: every block split at the document bounds inside it."""
    first_token = blocks * BLOCK_SIZE
    end_token = (first_token + BLOCK_SIZE).clamp(max=seq_len)
    edges = torch.tensor((0, seq_len) if bounds is None else bounds, device="cpu")
    starts, ends = edges[:-1], edges[1:]
    documents = (ends > starts).nonzero().flatten()  # those that have a token at all
    first = torch.searchsorted(ends[documents], first_token, right=True)
    last = torch.searchsorted(ends[documents], end_token - 1, right=True)
    pieces = last - first + 1
    slot = torch.arange(blocks.numel(), device="cpu").repeat_interleave(pieces)
    piece = torch.arange(slot.numel(), device="cpu") - (pieces.cumsum(0) - pieces).repeat_interleave(pieces)
    document = documents[first[slot] + piece]
    start, end, origin = starts[document], ends[document], first_token[slot]
    row_begin, row_end = (start - origin).clamp(min=0), torch.minimum(end, end_token[slot]) - origin
    columns = (slot, blocks[slot], row_begin, row_end, document, start, end, torch.zeros_like(slot))
    order = (document * (seq_len // BLOCK_SIZE + 1) + blocks[slot]).argsort()
    return torch.stack(columns, 1)[order]
