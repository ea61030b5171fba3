"""One number for all entries of an index: it depends on every entry and its place, not on how they lie in memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_mtraining.transport import agreement as digest_module
from megatron_mtraining.transport.agreement import index_digest
from megatron_mtraining.types import VerticalSlashIndex

from ..largest_result import LargestResult

TABLES = ("vertical", "num_vertical", "slash", "num_slash")


def random_index(rows=3, num_heads=4, widths=(5, 6)):
    """Small positive entries; a digest does not ask whether they make sense."""
    shapes = ((rows, num_heads, widths[0]), (rows, num_heads), (rows, num_heads, widths[1]), (rows, num_heads))
    return VerticalSlashIndex(*(torch.randint(0, 50, shape, dtype=torch.int32) for shape in shapes))


def with_tables(index, change):
    return VerticalSlashIndex(*(change(getattr(index, name)) for name in TABLES))


def test_a_change_of_any_entry_changes_it():
    index = random_index()
    before = index_digest(index)
    for name in TABLES:
        table = getattr(index, name).view(-1)
        for place, change in itertools.product(range(table.numel()), (1, -1, 2**30)):
            table[place] += change
            assert not torch.equal(index_digest(index), before), (name, place)
            table[place] -= change
    assert torch.equal(index_digest(index), before)


def test_a_unit_that_moves_to_any_other_place_changes_it():
    index = random_index(rows=2, num_heads=3, widths=(3, 4))
    zero = with_tables(index, torch.zeros_like)
    digests = set()
    places = 0
    for name in TABLES:
        table = getattr(zero, name).view(-1)
        for place in range(table.numel()):
            table[place] = 1
            digests.add(index_digest(zero).item())
            table[place] = 0
            places += 1
    assert len(digests) == places


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_expanded_tables_have_the_digest_of_their_copies(dims):
    index = random_index(rows=1 if 0 in dims else 3, num_heads=1 if 1 in dims else 4)
    expanded = with_tables(index, lambda table: table.expand(3, 4, *table.shape[2:]))
    assert torch.equal(index_digest(expanded), index_digest(with_tables(expanded, torch.clone)))
    mixed = VerticalSlashIndex(
        expanded.vertical.clone(), expanded.num_vertical, expanded.slash, expanded.num_slash.clone()
    )
    assert torch.equal(index_digest(expanded), index_digest(mixed))


def test_transposed_memory_and_chunks_change_nothing(monkeypatch):
    index = random_index()
    before = index_digest(index)
    turned = with_tables(index, lambda table: table.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(index_digest(turned), before)
    monkeypatch.setattr(digest_module, "_CACHED_ELEMENTS", 0)
    for chunk in (digest_module._CHUNK_ELEMENTS, 1):
        monkeypatch.setattr(digest_module, "_CHUNK_ELEMENTS", chunk)
        assert torch.equal(index_digest(index), before)
        assert torch.equal(index_digest(turned), before)


def test_a_dense_index_of_many_documents_costs_as_little_as_its_one_list():
    """Copied, its tables would be 1000 x 32 x 16384 entries: 2 GB, and twice that in int64."""
    index = VerticalSlashIndex.dense(rows=1000, num_heads=32, seq_len=2**20)
    with LargestResult() as largest:
        index_digest(index)
    assert 0 < largest.num_bytes < 2**20
