"""Selection over simulated ranks equals selection on one device, and every rank has the same index."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.config import INDEX_SHARINGS, LAYOUTS, MTrainingConfig
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.testing.simulator import RankSimulator
from tests.layouts import node_size_of

TENSORS = ("vertical", "num_vertical", "slash", "num_slash")


def config_of(**changes) -> MTrainingConfig:
    """A configuration that is sparse at test sizes."""
    small = {
        "num_probe_rows": 8,
        "num_probe_windows": 4,
        "sink_tokens": 3,
        "local_blocks": 2,
        "max_vertical": 12,
        "max_slash": 6,
        "dense_below": 0,
        "block_size": 4,
    }
    return MTrainingConfig.algorithm_1(**(small | changes))


def random_qk(seq_len, *, batch=1, heads=(4, 2), dtype=torch.float64):
    """Random query and key."""
    query = 2.0 * torch.randn(batch, seq_len, heads[0], 8, dtype=dtype)
    return query, torch.randn(batch, seq_len, heads[1], 8, dtype=dtype)


def select_on_ranks(query, key, config, *, kind, cp_size, **options):
    """Every rank's index, made from its own part."""
    layout = SequenceLayout(
        kind, seq_len=query.shape[1], cp_size=cp_size, block_size=config.block_size, node_size=node_size_of(cp_size)
    )

    def body(group):
        local = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key))
        return select(*local, config, layout=layout, groups=group, **options)

    return RankSimulator(cp_size).run(body)


def check(query, key, config, *, kind, cp_size, **options):
    """All ranks agree bit for bit, with each other and with one device."""
    alone = select(query, key, config, **options)
    for index in select_on_ranks(query, key, config, kind=kind, cp_size=cp_size, **options):
        assert all(torch.equal(getattr(index, name), getattr(alone, name)) for name in TENSORS)


def padded_len(kind, cp_size, *, at_least=120):
    """The shortest legal length that is not shorter than ``at_least``."""
    multiple = SequenceLayout.required_multiple(kind, cp_size=cp_size, block_size=4)
    return -(-at_least // multiple) * multiple


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ranks_and_layouts(kind, cp_size):
    query, key = random_qk(padded_len(kind, cp_size))
    check(query, key, config_of(), kind=kind, cp_size=cp_size)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize(("estimator", "index_sharing"), [("last_window", "head"), ("probe_windows", "kv_group")])
def test_packed_documents(kind, cp_size, estimator, index_sharing):
    seq_len = padded_len(kind, cp_size)
    cu_seqlens = torch.tensor([0, 0, 5, 6, 59, 100, seq_len], dtype=torch.int32)
    config = config_of(estimator=estimator, index_sharing=index_sharing, dense_below=10, slash_run_length=cp_size)
    check(*random_qk(seq_len), config, kind=kind, cp_size=cp_size, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_documents_that_miss_some_ranks(kind):
    """Each document of 7 tokens lies on one to three of 4 ranks; the others hold none of its keys."""
    seq_len = 128
    bounds = [*range(0, seq_len, 7), seq_len]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    config = config_of(local_blocks=1, sink_tokens=1, num_probe_rows=4)
    check(*random_qk(seq_len), config, kind=kind, cp_size=4, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("bounds", [[0, 698, 704], [0, 7, 704], [0, 697, 704, 704]])
def test_short_documents_beside_long_ones(kind, bounds):
    """Padding as a document of its own, and a document shorter than the number of ranks times anything."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    config = config_of(block_size=8, dense_below=5)
    check(*random_qk(704, heads=(2, 1)), config, kind=kind, cp_size=4, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("index_sharing", INDEX_SHARINGS)
@pytest.mark.parametrize(("batch", "heads"), [(3, (4, 2)), (2, (5, 1)), (1, (1, 1)), (9, (2, 1))])
def test_lists_that_do_not_divide_among_ranks(batch, heads, index_sharing):
    """More ranks than lists, and counts that leave a rank short."""
    config = config_of(index_sharing=index_sharing)
    check(*random_qk(160, batch=batch, heads=heads), config, kind="striped", cp_size=8)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("index_sharing", INDEX_SHARINGS)
def test_waves_and_chunks(kind, index_sharing, monkeypatch):
    """Scratch so small that a wave is one list per rank and a chunk a few keys."""
    monkeypatch.setattr("megatron_mtraining.selection.reference.SCRATCH_ELEMENTS", 64)
    monkeypatch.setattr("megatron_mtraining.selection.estimators.SCRATCH_ELEMENTS", 64)
    check(*random_qk(96, batch=2), config_of(index_sharing=index_sharing), kind=kind, cp_size=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_agree_in_low_precision(dtype):
    query, key = random_qk(192, dtype=dtype, heads=(8, 2))
    indices = select_on_ranks(query, key, config_of(), kind="zigzag", cp_size=4)
    for index in indices[1:]:
        assert all(torch.equal(getattr(index, name), getattr(indices[0], name)) for name in TENSORS)


def record_calls(group) -> list[str]:
    """Names of the collectives that are called on ``group`` from now on."""
    calls = []

    def recorded(name, method):
        def call(*arguments, **options):
            calls.append(name)
            return method(*arguments, **options)

        return call

    for name in ("exchange", "all_reduce", "assemble", "all_gather", "post_reduce_scatter", "all_to_all"):
        setattr(group, name, recorded(name, getattr(group, name)))
    return calls


def test_a_selection_is_the_digest_and_five_collectives():
    query, key = random_qk(96)
    layout = SequenceLayout("striped", seq_len=96, cp_size=4, block_size=4)

    def body(group):
        calls = record_calls(group)
        local = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key))
        select(*local, config_of(), layout=layout, groups=group)
        return calls

    expected = ["all_gather", "assemble", "all_reduce", "all_reduce", "all_to_all", "all_gather"]
    assert RankSimulator(4).run(body) == [expected] * 4


def test_documents_that_are_all_dense_leave_the_digest_alone():
    query, key = random_qk(96)
    layout = SequenceLayout("striped", seq_len=96, cp_size=4, block_size=4)

    def body(group):
        calls = record_calls(group)
        local = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key))
        select(*local, config_of(dense_below=96), layout=layout, groups=group)
        return calls

    assert RankSimulator(4).run(body) == [["all_gather"]] * 4
