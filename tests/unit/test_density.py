"""Kept pairs counted from lists equal the ones of the dense mask."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.metrics import backward_flops, causal_pairs, computed_pairs, density, forward_flops
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.types import VerticalSlashIndex

from .attention_inputs import as_cu_seqlens
from .metrics_cases import CASES, random_index, with_garbage


def mask_sums(index, *, seq_len, bounds):
    """int64 ``[rows, num_heads]``: pairs of each row of the index, off the oracle's mask."""
    mask = allowed_mask(index, seq_len=seq_len, cu_seqlens=as_cu_seqlens(bounds))
    if bounds is None:
        return mask.sum((2, 3))
    spans = zip(bounds[:-1], bounds[1:], strict=True)
    return torch.stack([mask[0, :, start:stop].sum((1, 2)) for start, stop in spans])


@pytest.mark.parametrize(("seq_len", "block_size", "bounds"), CASES)
def test_computed_pairs_equal_the_mask(seq_len, block_size, bounds):
    for _ in range(5):
        index = random_index(seq_len, block_size, bounds)
        kept = computed_pairs(index, seq_len=seq_len, cu_seqlens=as_cu_seqlens(bounds))
        assert kept.dtype == torch.int64
        assert torch.equal(kept, mask_sums(index, seq_len=seq_len, bounds=bounds))


@pytest.mark.parametrize(("seq_len", "block_size", "bounds"), CASES)
def test_entries_behind_the_counts_keep_nothing(seq_len, block_size, bounds):
    index = random_index(seq_len, block_size, bounds)
    options = {"seq_len": seq_len, "cu_seqlens": as_cu_seqlens(bounds)}
    assert torch.equal(computed_pairs(with_garbage(index), **options), computed_pairs(index, **options))


@pytest.mark.parametrize(("seq_len", "block_size", "bounds"), CASES)
def test_a_dense_index_keeps_every_causal_pair(seq_len, block_size, bounds):
    rows = 2 if bounds is None else len(bounds) - 1
    index = VerticalSlashIndex.dense(rows=rows, num_heads=3, seq_len=seq_len, block_size=block_size)
    options = {"seq_len": seq_len, "cu_seqlens": as_cu_seqlens(bounds)}
    assert torch.equal(computed_pairs(index, **options), causal_pairs(index, **options)[:, None].expand(rows, 3))
    assert density(index, **options).tolist() == [1.0] * 3


def test_a_pair_that_is_vertical_and_slash_counts_once():
    index = VerticalSlashIndex.from_lists([[[0, 1]]], [[[0, 1]]], seq_len=12, block_size=4)
    # Rows 0-3: 10 pairs, rows 4-11: 4 + own triangle, 10 each; only rows 8-11 see the verticals without a slash.
    assert computed_pairs(index, seq_len=12).tolist() == [[10 + (16 + 10) + (16 + 10) + 4 * 2]]


def test_counts_pass_two_to_the_31():
    million = 2**20
    index = VerticalSlashIndex.dense(rows=1, num_heads=1, seq_len=million)
    assert computed_pairs(index, seq_len=million).tolist() == [[million * (million + 1) // 2]]


def test_other_documents_than_the_indexs_are_refused():
    index = random_index(40, 4, [0, 40])
    with pytest.raises(ValueError, match=r"index\.rows must be the 2 documents of cu_seqlens, got 1\."):
        computed_pairs(index, seq_len=40, cu_seqlens=as_cu_seqlens([0, 20, 40]))


def test_flops_are_those_of_computed_pairs():
    """Two products forward and five backward, two operations per element of a head."""
    assert forward_flops(10, head_dim=64) == 10 * 2 * 2 * 64
    assert backward_flops(10, head_dim=64) == 10 * 5 * 2 * 64
