"""Pairs added up over many calls are the sum of those of each call, layer by layer."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.metrics import PairCounter, causal_pairs, kept_pairs, pair_counter
from megatron_mtraining.types import VerticalSlashIndex

from ..largest_result import LargestResult
from .attention_inputs import as_cu_seqlens
from .metrics_cases import random_index

CALLS = [
    # layer, seq_len, cu_seqlens, rows, do pairs of heads share lists
    (1, 96, None, 2, False),
    (2, 96, None, 2, True),
    (1, 64, None, 1, False),
    (2, 96, [0, 9, 9, 61, 96], 1, False),
    (1, 96, [0, 9, 9, 61, 96], 1, True),
    (1, 96, [0, 96], 1, False),
    (2, 96, None, 2, True),
]


@pytest.mark.parametrize("calls_at_once", [1, 3, 64])
def test_totals_are_sums_over_calls(calls_at_once, monkeypatch):
    monkeypatch.setattr(pair_counter, "_CALLS_AT_ONCE", calls_at_once)
    counter = PairCounter()
    kept, causal, whole = {}, {1: 0, 2: 0}, {1: 0, 2: 0}
    for layer, seq_len, bounds, rows, shares in CALLS:
        index = random_index(seq_len, 8, bounds, rows=rows, num_heads=2 if shares else 4)
        cu_seqlens = as_cu_seqlens(bounds)
        counter.add(layer, index, seq_len=seq_len, num_heads=4, head_dim=16, cu_seqlens=cu_seqlens)
        kept[layer] = kept.get(layer, 0) + kept_pairs(index.per_head(4), seq_len=seq_len, cu_seqlens=cu_seqlens).sum(0)
        causal[layer] += int(causal_pairs(index, seq_len=seq_len, cu_seqlens=cu_seqlens).sum())
        whole[layer] += rows * seq_len * (seq_len + 1) // 2
    assert counter.layers() == [1, 2]
    for layer, pairs in counter.totals().items():
        assert torch.equal(pairs.computed, kept[layer])
        assert (pairs.causal, pairs.whole, pairs.head_dim) == (causal[layer], whole[layer], 16)
        assert torch.equal(pairs.density, kept[layer].double() / causal[layer])


def test_what_each_rank_has_counted_is_added_up_by_documents():
    counter = PairCounter()
    bounds = as_cu_seqlens([0, 9, 9, 61, 96])
    counter.add_counted(2, torch.tensor([[3, 5]]), seq_len=96, head_dim=16, cu_seqlens=bounds)
    counter.add_counted(2, torch.tensor([[1, 1], [2, 2]]), seq_len=64, head_dim=16)
    pairs = counter.totals(over_ranks=lambda here: 2 * here)[2]
    triangles = {length: length * (length + 1) // 2 for length in (9, 52, 35, 64, 96)}
    assert pairs.computed.tolist() == [12, 16]
    assert pairs.causal == triangles[9] + triangles[52] + triangles[35] + 2 * triangles[64]
    assert (pairs.whole, pairs.head_dim) == (triangles[96] + 2 * triangles[64], 16)


def test_totals_go_on_until_cleared():
    counter, index = PairCounter(), random_index(64, 8, None)
    for calls in (1, 2):
        counter.add(5, index, seq_len=64, num_heads=index.num_lists, head_dim=8)
        assert torch.equal(counter.totals()[5].computed, calls * kept_pairs(index, seq_len=64).sum(0))
    counter.clear()
    assert counter.totals() == {} and counter.layers() == []


def test_dense_lists_of_many_calls_are_counted_in_bounded_memory():
    """Of 64 calls, tables of 8 heads and 4096 distances would be 17 MB of int64 each, and there are several."""
    counter, index = PairCounter(), VerticalSlashIndex.dense(rows=1, num_heads=8, seq_len=2**15, block_size=8)
    with LargestResult() as largest:
        for _ in range(64):
            counter.add(1, index, seq_len=2**15, num_heads=8, head_dim=8)
        kept = counter.totals()[1].computed
    assert kept.tolist() == [64 * 2**15 * (2**15 + 1) // 2] * 8
    assert largest.num_bytes <= 10e6


@pytest.mark.gpu
def test_the_host_never_waits_for_a_call():
    index = random_index(4096, 64, None).to("cuda")
    counter = PairCounter()
    counter.add(1, index, seq_len=4096, num_heads=index.num_lists, head_dim=64)
    counter.totals()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(130):
            counter.add(1, index, seq_len=4096, num_heads=index.num_lists, head_dim=64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(counter.totals()[1].computed, 131 * kept_pairs(index, seq_len=4096).sum(0).cpu())
