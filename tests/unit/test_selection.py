"""Selection on one device against the brute force, over every shape that the definition names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.config import INDEX_SHARINGS, MTrainingConfig

from .brute_selection import brute_force, lists_of


def config_of(**changes) -> MTrainingConfig:
    """A configuration that is sparse at test sizes."""
    small = {
        "num_probe_rows": 8,
        "num_probe_windows": 4,
        "sink_tokens": 3,
        "local_blocks": 2,
        "max_vertical": 12,
        "max_slash": 4,
        "dense_below": 0,
        "block_size": 8,
    }
    return MTrainingConfig.algorithm_1(**(small | changes))


def random_qk(seq_len, *, batch=1, heads=(4, 2), head_dim=8, dtype=torch.float64, sharpness=2.0):
    """Random query and key; ``sharpness`` sets how uneven the attention is."""
    query = sharpness * torch.randn(batch, seq_len, heads[0], head_dim, dtype=dtype)
    return query, torch.randn(batch, seq_len, heads[1], head_dim, dtype=dtype)


def check(query, key, config, **options) -> None:
    """The index equals the brute force's."""
    index = select(query, key, config, **options)
    assert index.block_size == config.block_size
    assert lists_of(index, seq_len=query.shape[1]) == brute_force(query, key, config, **options)


@pytest.mark.parametrize("estimator", ["last_window", "probe_windows"])
@pytest.mark.parametrize("block_size", [4, 8, 64])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 64, 130, 201])
def test_lengths_and_blocks(estimator, block_size, seq_len):
    check(*random_qk(seq_len), config_of(estimator=estimator, block_size=block_size))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("index_sharing", INDEX_SHARINGS)
def test_batch_and_grouped_heads(batch, heads, index_sharing):
    check(*random_qk(90, batch=batch, heads=heads), config_of(index_sharing=index_sharing))


def test_a_group_keeps_what_its_heads_look_at_together():
    """Two heads look at a key each, with half of what a third key gets from both: alone, neither would take it."""
    query, key = torch.zeros(1, 96, 2, 3).double(), torch.zeros(1, 96, 1, 3).double()
    query[:, :, 0, 0], query[:, :, 1, 1], query[..., 2] = 1.0, 1.0, 1.0
    key[:, 10, :, 0], key[:, 20, :, 1], key[:, 30, :, 2] = 9.0, 9.0, 8.5
    config = config_of(max_vertical=1, num_probe_rows=4)
    for index_sharing, wanted in (("head", [10, 20]), ("kv_group", [30])):
        index = select(query, key, replace(config, index_sharing=index_sharing), softmax_scale=1.0)
        assert index.vertical[0, :, config.sink_tokens].tolist() == wanted


@pytest.mark.parametrize("window", [1, 5, 12, 64, 100])
@pytest.mark.parametrize("seq_len", [50, 64, 100])
def test_windows_straddle_blocks_and_outgrow_the_document(window, seq_len):
    check(*random_qk(seq_len), config_of(num_probe_rows=window))


@pytest.mark.parametrize("top_p", [(1e-9, 1e-9), (0.3, 0.9), (0.9, 0.3), (1.0, 0.5), (0.5, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("caps", [(0, 0), (0, 4), (12, 0), (1, 1), (1000, 1000)])
def test_budgets_and_caps(top_p, caps):
    config = config_of(vertical_top_p=top_p[0], slash_top_p=top_p[1], max_vertical=caps[0], max_slash=caps[1])
    check(*random_qk(90, heads=(2, 1)), config)


@pytest.mark.parametrize("max_slash", [4, 7, 1000])
@pytest.mark.parametrize("slash_run_length", [2, 3, 4])
@pytest.mark.parametrize(("local_blocks", "bounds"), [(1, [0, 90]), (3, [0, 17, 17, 51, 150]), (12, [0, 90])])
def test_runs_of_distances(local_blocks, bounds, slash_run_length, max_slash):
    """Odd caps, a last run that is short, documents that are shorter than one, and those that are local throughout."""
    config = config_of(
        local_blocks=local_blocks, slash_run_length=slash_run_length, max_slash=max_slash, slash_top_p=0.7
    )
    cu_seqlens = None if len(bounds) == 2 else torch.tensor(bounds, dtype=torch.int32)
    check(*random_qk(bounds[-1], heads=(2, 1)), config, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(("sink_tokens", "local_blocks"), [(0, 1), (0, 5), (20, 1), (500, 1), (3, 500)])
def test_what_is_always_kept(sink_tokens, local_blocks):
    check(*random_qk(90), config_of(sink_tokens=sink_tokens, local_blocks=local_blocks))


@pytest.mark.parametrize("softmax_scale", [0.01, 1.0, 10.0])
def test_softmax_scale_is_the_callers(softmax_scale):
    check(*random_qk(90), config_of(vertical_top_p=0.5, max_vertical=90), softmax_scale=softmax_scale)


PACKS = [
    [0, 90],
    [0, 0, 90, 90],
    [0, 1, 2, 90],
    [0, 9, 17, 25, 37, 45, 57],
    [0, 33, 66, 99, 101],
    [0, 3, 70, 70, 71, 150],
]


@pytest.mark.parametrize("estimator", ["last_window", "probe_windows"])
@pytest.mark.parametrize("dense_below", [0, 1, 33, 66])
@pytest.mark.parametrize("bounds", PACKS)
def test_packed_documents(estimator, dense_below, bounds):
    sharing = "kv_group" if dense_below % 2 else "head"
    config = config_of(estimator=estimator, dense_below=dense_below, index_sharing=sharing)
    check(*random_qk(bounds[-1], heads=(2, 1)), config, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("seq_len", [89, 90, 91])
def test_dense_below_counts_the_length_itself(seq_len):
    config = config_of(dense_below=90)
    index = select(*random_qk(seq_len), config)
    assert bool((index.num_slash == -(-seq_len // config.block_size)).all()) == (seq_len <= 90)
    check(*random_qk(seq_len), config)


def test_a_document_equals_itself_alone():
    """Where a document starts on the block grid, what stands around it does not matter."""
    query, key = random_qk(144)
    config = config_of()
    packed = select(query, key, config, cu_seqlens=torch.tensor([0, 40, 120, 144], dtype=torch.int32))
    alone = select(query[:, 40:120], key[:, 40:120], config)
    packed_lists = lists_of(packed, seq_len=144)[1]
    for (vertical, slash), (own_vertical, own_slash) in zip(packed_lists, lists_of(alone, seq_len=80)[0], strict=True):
        assert vertical == [40 + position for position in own_vertical]
        assert slash == own_slash


def test_equal_scores_break_ties_to_the_lower_position():
    key = torch.randn(1, 200, 2, 8)
    query = torch.zeros(1, 200, 4, 8)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        config = config_of(vertical_top_p=0.05, max_vertical=6, slash_top_p=1.0, max_slash=3)
        index = select(query.to(dtype), key.to(dtype), config)
        assert lists_of(index, seq_len=200)[0] == [([0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4])] * 4
        check(query.double(), key.double(), config)


def test_first_token_with_most_of_the_mass_costs_no_budget():
    """Ninety percent on the first token: it is a sink, and the budgets go to what it leaves."""
    seq_len, planted = 160, [31, 77, 100]
    query = torch.zeros(1, seq_len, 1, 8, dtype=torch.float64)
    query[..., 0] = 1.0
    key = torch.zeros(1, seq_len, 1, 8, dtype=torch.float64)
    key[:, 0, :, 0] = 10.0
    key[:, planted, :, 0] = 6.0
    config = config_of(sink_tokens=1, vertical_top_p=0.5, max_vertical=50)
    index = select(query, key, config, softmax_scale=1.0)
    (vertical, slash), *_ = lists_of(index, seq_len=seq_len)[0]
    assert torch.softmax(key[0, :, 0, 0], 0)[0] > 0.9
    assert vertical == [0, *planted[:2]]
    assert 0 in slash and 1 in slash
    check(query, key, config, softmax_scale=1.0)


def test_the_crossing_vertical_is_in():
    """Sinks off and one key with 90 % of the mass: exclusive top-p would drop the very key that matters."""
    query = torch.ones(1, 160, 1, 1, dtype=torch.float64)
    key = torch.zeros(1, 160, 1, 1, dtype=torch.float64)
    key[:, 5] = 8.0
    config = config_of(sink_tokens=0, local_blocks=1, vertical_top_p=0.5)
    assert lists_of(select(query, key, config), seq_len=160)[0][0][0] == [5]


def test_no_key_may_come_after_its_row():
    """A huge score after the probe rows' causal edge neither is chosen nor overflows."""
    query, key = torch.ones(1, 96, 1, 4), torch.zeros(1, 96, 1, 4)
    key[:, 90:] = 1e4
    config = config_of(estimator="probe_windows", num_probe_rows=8, num_probe_windows=2)
    index = select(query, key, config)
    (vertical, _), *_ = lists_of(index, seq_len=96)[0]
    assert max(vertical) < 88


def test_the_first_key_behind_a_row_takes_nothing_of_its_mass(monkeypatch):
    """Row 47 looks at key 10, and would at key 48 alone if it saw that one; row 95 looks at key 20, with less.

    Keys are scored seven at a time, and key 48 ends the first chunk that needs a mask.
    """
    monkeypatch.setattr("megatron_mtraining.selection.reference.SCRATCH_ELEMENTS", 14)
    query, key = torch.zeros(1, 96, 1, 3), torch.zeros(1, 96, 1, 3)
    query[0, 47, 0], query[0, 95, 0] = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    key[0, 10, 0, 0], key[0, 20, 0, 1], key[0, 48, 0, 2] = 9.0, 5.0, 1e4
    config = config_of(estimator="probe_windows", num_probe_rows=2, num_probe_windows=2, max_vertical=1)
    index = select(query, key, config, softmax_scale=1.0)
    assert lists_of(index, seq_len=96)[0][0][0] == [0, 1, 2, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_float32(dtype):
    query, key = random_qk(150, dtype=torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    index = select(query, key, config_of())
    exact = select(query.float(), key.float(), config_of())
    assert lists_of(index, seq_len=150) == lists_of(exact, seq_len=150)


def test_float32_agrees_with_the_brute_force_on_separated_masses():
    query, key = random_qk(150, dtype=torch.float32, sharpness=4.0)
    index = select(query, key, config_of())
    assert lists_of(index, seq_len=150) == brute_force(query, key, config_of())


@pytest.mark.parametrize("index_sharing", INDEX_SHARINGS)
def test_chunks_of_keys_do_not_change_the_choice(index_sharing, monkeypatch):
    """Scratch so small that every chunk holds a few keys and every wave one list."""
    query, key = random_qk(200, batch=2, heads=(4, 2))
    config = config_of(index_sharing=index_sharing)
    expected = lists_of(select(query, key, config), seq_len=200)
    monkeypatch.setattr("megatron_mtraining.selection.reference.SCRATCH_ELEMENTS", 100)
    monkeypatch.setattr("megatron_mtraining.selection.estimators.SCRATCH_ELEMENTS", 100)
    assert lists_of(select(query, key, config), seq_len=200) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_call_gives_the_same_bits(dtype):
    query, key = random_qk(300, dtype=dtype, heads=(8, 2))
    first, second = (select(query, key, config_of(block_size=4)) for _ in range(2))
    for name in ("vertical", "num_vertical", "slash", "num_slash"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_strided_input_and_autocast_change_nothing():
    query, key = random_qk(120, dtype=torch.float32)
    expected = lists_of(select(query, key, config_of()), seq_len=120)
    strided = [torch.stack((each, each + 1), dim=-1)[..., 0] for each in (query, key)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lists_of(select(*strided, config_of()), seq_len=120) == expected


def test_selection_takes_no_part_in_autograd():
    query, key = random_qk(90)
    query.requires_grad_()
    select(query, key, config_of())
    assert query.grad is None
