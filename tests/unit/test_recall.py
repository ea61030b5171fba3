"""Attention recall equals the kept share of a dense softmax, on one device and over ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.config import LAYOUTS, MTrainingConfig
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.metrics import attention_recall, held_out_rows
from megatron_mtraining.selection import ESTIMATORS
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.types import VerticalSlashIndex
from tests.layouts import node_size_of

from .attention_inputs import as_cu_seqlens
from .metrics_cases import CASES, random_index, with_garbage


def random_qk(seq_len, *, batch, dtype=torch.float64):
    """Random query of 4 heads and key of 2."""
    return 2 * torch.randn(batch, seq_len, 4, 8, dtype=dtype), torch.randn(batch, seq_len, 2, 8, dtype=dtype)


def dense_recall(query, key, index, *, rows, bounds, scale=8**-0.5):
    """``[batch, num_heads, rows]``, with S x S probabilities."""
    seq_len = query.shape[1]
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(2, dim=2))
    everything = VerticalSlashIndex.dense(rows=index.rows, num_heads=4, seq_len=seq_len, block_size=index.block_size)
    options = {"seq_len": seq_len, "cu_seqlens": as_cu_seqlens(bounds)}
    visible = allowed_mask(everything, **options)
    probability = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return (probability * allowed_mask(index, **options)).sum(-1)[:, :, list(rows)]


@pytest.mark.parametrize(("seq_len", "block_size", "bounds"), CASES)
def test_equals_a_dense_softmax(seq_len, block_size, bounds):
    batch = 2 if bounds is None else 1
    query, key = random_qk(seq_len, batch=batch)
    index = random_index(seq_len, block_size, bounds, num_heads=4, rows=batch)
    rows = range(0, seq_len, 3)
    recall = attention_recall(query, key, index, rows=rows, cu_seqlens=as_cu_seqlens(bounds))
    assert torch.allclose(recall, dense_recall(query, key, index, rows=rows, bounds=bounds), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("seq_len", "block_size", "bounds"), CASES)
def test_entries_behind_the_counts_recall_nothing(seq_len, block_size, bounds):
    batch = 2 if bounds is None else 1
    query, key = random_qk(seq_len, batch=batch)
    index = random_index(seq_len, block_size, bounds, num_heads=4, rows=batch)
    options = {"rows": range(0, seq_len, 3), "cu_seqlens": as_cu_seqlens(bounds)}
    recalls = [attention_recall(query, key, each, **options) for each in (with_garbage(index), index)]
    assert torch.equal(*recalls)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 50, 96]])
def test_ranks_agree_with_one_device(kind, cp_size, bounds):
    layout = SequenceLayout(kind, seq_len=96, cp_size=cp_size, block_size=4, node_size=node_size_of(cp_size))
    query, key = random_qk(96, batch=1)
    index = random_index(96, 4, bounds, num_heads=4, rows=1)
    options = {"rows": (0, 3, 20, 49, 95), "cu_seqlens": as_cu_seqlens(bounds), "softmax_scale": 0.5}

    def body(group):
        local = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key))
        return attention_recall(*local, index, layout=layout, groups=group, **options)

    alone = attention_recall(query, key, index, **options)
    for recall in RankSimulator(cp_size).run(body):
        assert torch.allclose(recall, alone, rtol=0, atol=1e-12)


def test_chunks_do_not_matter(monkeypatch):
    query, key = random_qk(77, batch=2)
    index = random_index(77, 8, None, num_heads=4)
    expected = attention_recall(query, key, index, rows=range(77))
    monkeypatch.setattr("megatron_mtraining.selection.reference.SCRATCH_ELEMENTS", 1000)
    assert torch.allclose(attention_recall(query, key, index, rows=range(77)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", range(1, 9))
def test_chunks_may_end_anywhere_behind_the_first_row(width, monkeypatch):
    """Those that every row sees whole need no mask; the key behind row 14 does, wherever its chunk ends."""
    query, key = random_qk(24, batch=1)
    index, rows = random_index(24, 8, None, num_heads=4, rows=1), (14, 17, 23)
    monkeypatch.setattr("megatron_mtraining.selection.reference.SCRATCH_ELEMENTS", width * 2 * len(rows))
    recall = attention_recall(query, key, index, rows=rows)
    assert torch.allclose(recall, dense_recall(query, key, index, rows=rows, bounds=None), rtol=0, atol=1e-12)


def test_a_dense_index_recalls_everything():
    query, key = random_qk(77, batch=1, dtype=torch.bfloat16)
    index = VerticalSlashIndex.dense(rows=1, num_heads=4, seq_len=77, block_size=8)
    assert attention_recall(query, key, index, rows=range(77)).eq(1.0).all()


@pytest.mark.parametrize("estimator", ["last_window", "probe_windows"])
@pytest.mark.parametrize("bounds", [None, [0, 10, 500]])
def test_held_out_rows_are_not_probe_rows(estimator, bounds):
    config = MTrainingConfig(estimator=estimator, num_probe_rows=64, num_probe_windows=8, dense_below=20)
    rows = held_out_rows(config, seq_len=500, count=50, cu_seqlens=as_cu_seqlens(bounds))
    start = 0 if bounds is None else 10
    assert len(rows) == 50 and list(rows) == sorted(set(rows))
    assert not set(rows) & set(ESTIMATORS.get(estimator).probe_rows(start, 500, config))
    assert rows[0] < 20 and rows[-1] > 400


def test_rows_held_out_of_several_estimators():
    both = [
        MTrainingConfig(estimator=name, num_probe_rows=64, dense_below=0) for name in ("last_window", "probe_windows")
    ]
    rows = held_out_rows(*both, seq_len=500, count=500)
    looked_at = {row for each in both for row in ESTIMATORS.get(each.estimator).probe_rows(0, 500, each)}
    assert set(rows) == set(range(500)) - looked_at


def test_no_row_of_a_document_that_attends_densely_is_looked_at():
    config = MTrainingConfig.algorithm_1(dense_below=96)
    assert held_out_rows(config, seq_len=96, count=200) == tuple(range(96))
    assert held_out_rows(config, seq_len=97, count=200) == tuple(range(33))


def test_held_out_rows_run_out():
    config = MTrainingConfig.algorithm_1(dense_below=0)
    assert held_out_rows(config, seq_len=66, count=10) == (0, 1)
    assert held_out_rows(config, seq_len=60, count=10) == ()


@pytest.mark.parametrize("rows", [(), (3, 2), (2, 2), (-1,), (77,)])
def test_rows_that_do_not_exist_are_refused(rows):
    query, key = random_qk(77, batch=1)
    with pytest.raises(ValueError, match=r"rows must be ascending positions below 77, at least one, got "):
        attention_recall(query, key, random_index(77, 8, None, num_heads=4, rows=1), rows=rows)
