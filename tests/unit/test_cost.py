"""The budget by cost: against the oracle in float64, on numbers that a reader can check, and where ranks share them."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mtraining import select
from megatron_mtraining.config import INDEX_SHARINGS, LAYOUTS, MTrainingConfig
from megatron_mtraining.metrics import causal_pairs, computed_pairs
from megatron_mtraining.selection.budget import most_pairs
from tests.draws import examples

from .brute_selection import lists_of
from .test_selection import check, random_qk
from .test_selection_distributed import check as check_on_ranks
from .test_selection_distributed import padded_len


def config_of(**changes) -> MTrainingConfig:
    """A configuration that is sparse at test sizes, and never dense."""
    small = {"num_probe_rows": 16, "num_probe_windows": 4, "sink_tokens": 3, "local_blocks": 2, "block_size": 8}
    return MTrainingConfig(**({"dense_below": 0, "dense_above": 1.0, "target_recall": 0.6} | small | changes))


@pytest.mark.parametrize("estimator", ["last_window", "probe_windows"])
@pytest.mark.parametrize("block_size", [4, 8, 64])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 17, 130, 201])
def test_lengths_and_blocks(estimator, block_size, seq_len):
    check(*random_qk(seq_len), config_of(estimator=estimator, block_size=block_size))


@pytest.mark.parametrize("index_sharing", INDEX_SHARINGS)
@pytest.mark.parametrize(("batch", "heads"), [(3, (4, 2)), (1, (1, 1)), (2, (6, 2)), (1, (4, 1))])
@pytest.mark.parametrize("max_density", [None, 0.3])
def test_batch_and_grouped_heads(batch, heads, index_sharing, max_density):
    config = config_of(index_sharing=index_sharing, max_density=max_density, target_recall=0.9)
    check(*random_qk(150, batch=batch, heads=heads), config)


@pytest.mark.parametrize("target_recall", [1e-9, 0.2, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize(("sink_tokens", "local_blocks"), [(0, 1), (3, 2), (20, 5), (500, 1), (3, 500)])
def test_targets_and_what_is_always_selected(target_recall, sink_tokens, local_blocks):
    config = config_of(target_recall=target_recall, sink_tokens=sink_tokens, local_blocks=local_blocks)
    check(*random_qk(150, heads=(2, 1)), config)


@pytest.mark.parametrize("target_recall", [0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize(("windows", "seq_len"), [(8, 150), (8, 64), (16, 300), (7, 150)])
def test_halves_of_many_windows(windows, seq_len, target_recall):
    config = config_of(num_probe_rows=4 * windows, num_probe_windows=windows, target_recall=target_recall)
    check(*random_qk(seq_len, heads=(4, 2)), config)
    check(*random_qk(seq_len, heads=(4, 2)), config_of(**_changes(config), index_sharing="kv_group"))


def _changes(config: MTrainingConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("num_probe_rows", "num_probe_windows", "target_recall")}


def test_a_column_of_one_window_is_none_of_the_document():
    """Rows of one window alone look at key 20, all rows look at key 30: the second is a column."""
    seq_len = 640
    query, key = torch.zeros(1, seq_len, 1, 4, dtype=torch.float64), torch.zeros(1, seq_len, 1, 4, dtype=torch.float64)
    query[..., 0] = 1
    key[:, 30, :, 0] = 20
    config = config_of(num_probe_rows=40, num_probe_windows=10, target_recall=0.95)
    query[:, 508:512, :, 1] = 1  # the eighth window
    key[:, 20, :, 1] = 40
    index = select(query, key, config, softmax_scale=1.0)
    assert index.vertical[0, 0, : index.num_vertical[0, 0]].tolist() == [0, 1, 2, 30]
    last = config_of(num_probe_rows=40, num_probe_windows=2, target_recall=0.95)  # too few windows to compare halves
    query[:, 316:320, :, 1] = 1
    index = select(query, key, last, softmax_scale=1.0)
    assert 20 in index.vertical[0, 0, : index.num_vertical[0, 0]].tolist()


@pytest.mark.parametrize("bounds", [[0, 0, 90, 90], [0, 1, 2, 90], [0, 9, 17, 25, 37, 57], [0, 3, 70, 70, 71, 190]])
@pytest.mark.parametrize("changes", [{}, {"dense_above": 0.4}, {"max_density": 0.35}, {"dense_below": 33}])
def test_packed_documents(bounds, changes):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    check(*random_qk(bounds[-1], heads=(2, 1)), config_of(target_recall=0.8, **changes), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("budget", ["top_p", "fixed", "top_p_literal"])
@pytest.mark.parametrize("caps", [(0, 0), (12, 4), (1000, 1000)])
def test_the_other_budgets_beside_it(budget, caps):
    config = config_of(budget=budget, max_vertical=caps[0], max_slash=caps[1])
    check(*random_qk(150, heads=(2, 1)), config)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("max_density", [None, 0.4])
def test_ranks_and_layouts(kind, cp_size, max_density):
    query, key = random_qk(padded_len(kind, cp_size))
    check_on_ranks(query, key, config_of(block_size=4, max_density=max_density), kind=kind, cp_size=cp_size)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"max_density": 0.4, "index_sharing": "kv_group"}, {"dense_above": 0.5}])
def test_packed_documents_on_ranks(kind, changes):
    seq_len = padded_len(kind, 3)
    cu_seqlens = torch.tensor([0, 0, 5, 6, 59, 100, seq_len], dtype=torch.int32)
    config = config_of(block_size=4, dense_below=10, target_recall=0.8, **changes)
    check_on_ranks(*random_qk(seq_len), config, kind=kind, cp_size=3, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("index_sharing", INDEX_SHARINGS)
@pytest.mark.parametrize("max_density", [None, 0.4])
@pytest.mark.parametrize("cp_size", [1, 8])
def test_waves_and_lists_that_do_not_divide_among_ranks(cp_size, max_density, index_sharing, monkeypatch):
    """Scratch so small that a wave is one list for each rank, of which the last wave has too few."""
    query, key = random_qk(96, batch=3, heads=(2, 2))
    config = config_of(max_density=max_density, index_sharing=index_sharing, block_size=4)
    expected = select(query, key, config)
    monkeypatch.setattr("megatron_mtraining.selection.reference.SCRATCH_ELEMENTS", 64)
    monkeypatch.setattr("megatron_mtraining.selection.estimators.SCRATCH_ELEMENTS", 64)
    assert lists_of(select(query, key, config), seq_len=96) == lists_of(expected, seq_len=96)
    if cp_size > 1:
        check_on_ranks(query, key, config, kind="striped", cp_size=cp_size)


def test_more_probe_rows_than_tokens_are_all_rows():
    query, key = random_qk(90)
    many, all_rows = (
        config_of(num_probe_rows=rows, num_probe_windows=windows) for rows, windows in ((512, 64), (90, 1))
    )
    assert lists_of(select(query, key, many), seq_len=90) == lists_of(select(query, key, all_rows), seq_len=90)


def equal_attention(seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A query that looks at every key alike."""
    return torch.zeros(1, seq_len, 1, 4, dtype=torch.float64), torch.randn(1, seq_len, 1, 4, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_rates_go_to_columns_and_then_to_the_lower_position(dtype):
    """The last row has 1/128 for each key: columns and distances have one rate, and 12 of 112 keys reach a tenth."""
    query, key = equal_attention(128)
    config = config_of(estimator="last_window", num_probe_rows=1, sink_tokens=0, target_recall=1 - (112 - 4) / 128)
    query, key = query.to(dtype), key.to(dtype)
    assert lists_of(select(query, key, config), seq_len=128)[0] == [([0, 1, 2, 3], [0, 1])]
    more = config_of(estimator="last_window", num_probe_rows=1, sink_tokens=0, target_recall=1 - (112 - 20) / 128)
    # Eight columns are all that 128 tokens may have; twelve keys more are missing, of a distance's eight: two.
    verticals, slashes = lists_of(select(query, key, more), seq_len=128)[0][0]
    assert verticals == list(range(8)) and slashes == [0, 1, 2, 3]


def test_planted_ties_go_to_the_lower_position():
    """Two columns with the same mass, and room for one."""
    query, key = torch.zeros(2, 1, 160, 1, 2, dtype=torch.float64)
    query[..., 0], key[:, [50, 90], :, 0] = 1.0, 9.0
    config = config_of(estimator="last_window", num_probe_rows=4, target_recall=0.4, local_blocks=1)
    first = lists_of(select(query, key, config, softmax_scale=1.0), seq_len=160)[0]
    assert first == [([0, 1, 2, 50], [0])]
    check(query, key, config, softmax_scale=1.0)


def test_a_line_is_ranked_by_the_mass_of_each_pair():
    """Of a column with a share of .3 and a distance with .6, the column is taken first: a pair of it holds more."""
    query, key = torch.zeros(2, 1, 128, 1, 2, dtype=torch.float64)
    query[..., 0], key[0, 20, :, 0], key[0, 64:72, :, 0] = 1.0, 7.6, 6.2
    config = config_of(
        estimator="last_window", num_probe_rows=1, sink_tokens=0, local_blocks=1, target_recall=0.26, dense_above=0.9
    )
    assert lists_of(select(query, key, config, softmax_scale=1.0), seq_len=128)[0] == [([20], [0])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nan_in_a_key_selects_what_is_always_selected(dtype):
    """As with ``top_p``: no comparison with NaN holds. Lists of other heads are untouched."""
    query, key = random_qk(160, heads=(4, 2), dtype=dtype)
    expected = lists_of(select(query, key, config_of()), seq_len=160)[0]
    key[0, 30, 1, 0] = math.nan
    alone = ([0, 1, 2], [0, 1])
    for config in (config_of(), config_of(max_density=0.9), config_of(target_recall=1.0)):
        lists = lists_of(select(query, key, config), seq_len=160)[0]
        assert lists[2:] == [alone, alone]
        if config.target_recall == 0.6:
            assert lists[:2] == expected[:2]
    top_p = MTrainingConfig.algorithm_1(block_size=8, dense_below=0, sink_tokens=3, local_blocks=2)
    assert lists_of(select(query, key, top_p), seq_len=160)[0][2:] == [alone, alone]


def test_columns_end_at_a_sixteenth_of_the_tokens_and_distances_make_up_for_them():
    query, key = random_qk(160, sharpness=1.0)
    config = config_of(target_recall=0.8)
    index = select(query, key, config)
    assert index.vertical.shape[2] == 10 + config.sink_tokens
    assert (index.num_vertical == 10 + config.sink_tokens).all()
    assert (index.num_slash > config.local_blocks).all()
    check(query, key, config)


def test_a_list_above_a_density_is_dense():
    """The bound is on pairs that are counted as the definition counts: those of both kinds twice."""
    query, key = random_qk(160)
    free = select(query, key, config_of(target_recall=0.9))
    verticals, slashes = lists_of(free, seq_len=160)[0][1]
    pairs = sum(160 - position for position in verticals) + sum(20 - distance for distance in slashes) * 64
    causal = 160 * 161 // 2
    for dense_above, is_dense in (((pairs - 0.5) / causal, True), ((pairs + 0.5) / causal, False)):
        config = config_of(target_recall=0.9, dense_above=min(1.0, dense_above))
        lists = lists_of(select(query, key, config), seq_len=160)[0][1]
        assert lists == (([], list(range(20))) if is_dense else (verticals, slashes))
        check(query, key, config)


@pytest.mark.parametrize("max_density", [0.2, 0.3, 1.0])
def test_a_bound_holds_for_the_layer_and_gives_all_that_it_allows(max_density):
    """Of six heads of different sharpness, the sparse ones are untouched."""
    query, key = random_qk(320, heads=(6, 2))
    query *= torch.tensor([16.0, 8.0, 0.1, 1.0, 0.5, 12.0], dtype=query.dtype).view(1, 1, -1, 1)
    config = config_of(target_recall=0.7, max_density=max_density)
    free, bound = (select(query, key, each) for each in (config_of(target_recall=0.7), config))
    check(query, key, config)
    pairs = computed_pairs(bound, seq_len=320).sum() / (6 * causal_pairs(bound, seq_len=320).sum())
    assert pairs <= max_density
    lists, before = (lists_of(index, seq_len=320)[0] for index in (bound, free))
    same = [after == original for after, original in zip(lists, before, strict=True)]
    assert all(same) if max_density == 1.0 else any(same) and not all(same)
    for (verticals, slashes), (all_verticals, all_slashes) in zip(lists, before, strict=True):
        assert set(verticals) <= set(all_verticals) and set(slashes) <= set(all_slashes)


def test_sinks_and_local_blocks_are_selected_even_above_the_bound():
    query, key = random_qk(160)
    config = config_of(max_density=0.01, sink_tokens=20, local_blocks=4)
    assert lists_of(select(query, key, config), seq_len=160)[0] == [(list(range(20)), [0, 1, 2, 3])] * 4


@examples(60)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1275)), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_water_filling(drawn, max_density):
    """Lists below the level have all they want, the others the level, and together they fill the bound."""
    causal = torch.tensor([[length * (length + 1) // 2] for length, _ in drawn])
    pairs = torch.tensor([[wanted] for _, wanted in drawn]).minimum(causal)
    most = most_pairs(pairs, causal, max_density)
    allowed = pairs.minimum(most)
    total = max_density * float(causal.sum())
    assert float(allowed.sum()) <= total + 1e-6
    is_limited = pairs > most
    if is_limited.any():
        assert float(allowed.sum()) > total - len(drawn)  # each is rounded down
        level = (most / causal)[is_limited].max()
        assert ((pairs / causal)[~is_limited] <= level + 1 / causal[~is_limited]).all()
    else:
        assert float(pairs.sum()) <= total or torch.equal(most, causal)


def test_rows_that_differ_in_padding_are_bounded_each_by_itself():
    query, key = random_qk(160, batch=2)
    config = config_of(max_density=0.3, target_recall=0.9)
    index = select(query, key, config, num_valid=torch.tensor([160, 96], dtype=torch.int32))
    alone = select(query[:1], key[:1], config)
    assert lists_of(index, seq_len=160)[0] == lists_of(alone, seq_len=160)[0]


class Waits(TorchDispatchMode):
    """Refuses what makes the host wait for a device: a size or a value that depends on contents."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique_consecutive", "_unique2", "equal")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket.__name__ not in self.WAITING, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("changes", [{}, {"max_density": 0.3}, {"dense_above": 0.4}, {"budget": "top_p_literal"}])
@pytest.mark.parametrize("bounds", [None, [0, 3, 100, 101, 160]])
def test_the_host_waits_for_nothing(changes, bounds):
    """Once the tables of integers are there, as from the second layer on."""
    query, key = random_qk(160)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    select(query, key, config_of(**changes), cu_seqlens=cu_seqlens)
    with Waits():
        select(query, key, config_of(**changes), cu_seqlens=cu_seqlens)


def test_widths_grow_with_the_sequence():
    query = torch.zeros(1, 1, 1, 1).expand(1, 4096, 1, 1)
    index = select(query, query, MTrainingConfig(dense_below=0))
    assert (index.vertical.shape[2], index.slash.shape[2]) == (16 + 256, 64)
    packed = select(query, query, MTrainingConfig(dense_below=0), cu_seqlens=torch.tensor([0, 3000, 4096]).int())
    assert (packed.vertical.shape[2], packed.slash.shape[2]) == (16 + 188, 47)
