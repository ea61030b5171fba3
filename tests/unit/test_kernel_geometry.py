"""The integer tables that the CUDA kernels read, against a walk over every token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_mtraining.backends.cuda import geometry as kernel_geometry
from megatron_mtraining.backends.cuda.geometry import device_geometry
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.types import Documents

CPU = torch.device("cpu")


def geometry(seq_len, query_blocks, key_blocks, bounds):
    return BlockGeometry(
        seq_len=seq_len,
        block_size=64,
        query_blocks=torch.tensor(query_blocks),
        key_blocks=torch.tensor(key_blocks),
        documents=None if bounds is None else Documents(tuple(bounds)),
    )


def expected_tiles(seq_len, blocks, bounds):
    """One entry for each (document, block) that share a token, found token by token."""
    bounds = bounds or (0, seq_len)
    tiles = []
    for document, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        for block in sorted(blocks):
            rows = [t % 64 for t in range(block * 64, min(block * 64 + 64, seq_len)) if start <= t < end]
            if rows:
                tiles.append([blocks.index(block), block, rows[0], rows[-1] + 1, document, start, end, 0])
    return tiles


@pytest.mark.parametrize(
    ("seq_len", "query_blocks", "key_blocks", "bounds"),
    [
        (640, list(range(10)), list(range(10)), None),
        (625, list(range(10)), list(range(10)), None),
        (1, [0], [0], None),
        (768, [1, 5, 9], [0, 4, 8, 2, 6, 10], None),
        (625, list(range(10)), list(range(10)), (0, 1, 1, 64, 65, 130, 131, 132, 500, 500, 625)),
        (640, [7, 0, 3], [9, 2], (0, 0, 200, 210, 640, 640)),
    ],
)
def test_tables_agree_with_every_token(seq_len, query_blocks, key_blocks, bounds):
    tables = device_geometry(geometry(seq_len, query_blocks, key_blocks, bounds), CPU)
    assert tables.query_tiles.tolist() == expected_tiles(seq_len, query_blocks, bounds)
    assert tables.key_tiles.tolist() == expected_tiles(seq_len, key_blocks, bounds)
    for slots, blocks in ((tables.query_slots, query_blocks), (tables.key_slots, key_blocks)):
        assert slots.tolist() == [blocks.index(b) if b in blocks else -1 for b in range(-(-seq_len // 64))]
    documents = tables.query_tiles[:, 4].tolist()
    for document in range(1 if bounds is None else len(bounds) - 1):
        low, high = tables.document_tiles[document : document + 2].tolist()
        assert documents[low:high] == [document] * documents.count(document)
    assert tables.document_tiles[-1] == len(documents)
    assert tables.query_tiles.dtype == torch.int32


def test_equal_geometries_share_their_tables():
    first, second = (device_geometry(geometry(640, [0, 1], [2], None), CPU) for _ in range(2))
    assert first is second
    assert device_geometry(geometry(640, [0, 1], [3], None), CPU) is not first


def test_a_geometry_of_the_same_tensors_is_found_without_reading_them(monkeypatch):
    """A launch costs the host the same for any number of blocks: a ring hands the same tensors in, step after step."""
    first = BlockGeometry.whole(seq_len=704, block_size=64)
    tables = device_geometry(first, CPU)
    monkeypatch.setattr(kernel_geometry, "_bytes", None)
    assert device_geometry(BlockGeometry.whole(seq_len=704, block_size=64), CPU) is tables
    assert device_geometry(replace(first, documents=None), CPU) is tables
