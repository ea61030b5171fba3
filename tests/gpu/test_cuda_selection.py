"""The selection's kernels: by the budget rule on exact masses, entry for entry where nothing is close, and bit for bit
over runs, ranks and layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.config import INDEX_SHARINGS, MTrainingConfig
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.selection import reference
from megatron_mtraining.testing.error_budget import nan_filled_empty
from megatron_mtraining.testing.simulator import RankSimulator

from .cases import BLOCK, Case
from .selection_checks import check_lists

pytestmark = pytest.mark.gpu

TENSORS = ("vertical", "num_vertical", "slash", "num_slash")
CONFIG = MTrainingConfig.algorithm_1(
    num_probe_rows=64,
    sink_tokens=5,
    local_blocks=2,
    max_vertical=200,
    max_slash=9,
    vertical_top_p=0.4,
    slash_top_p=0.8,
    dense_below=0,
)
PROBES = replace(CONFIG, estimator="probe_windows", vertical_top_p=0.2)
SHARED = replace(CONFIG, index_sharing="kv_group")
SHARED_PROBES = replace(PROBES, index_sharing="kv_group")
COST = MTrainingConfig(
    num_probe_rows=64,
    num_probe_windows=8,
    sink_tokens=5,
    local_blocks=2,
    target_recall=0.8,
    dense_above=1.0,
    dense_below=0,
)
SHARED_COST = replace(COST, index_sharing="kv_group")
FIXED = replace(CONFIG, budget="fixed", max_vertical=50, max_slash=8, slash_run_length=2)
PACK = (0, 9, 9, 700, 701, 2000, 3000)
BLOCKS_OF_THREE = (0, 70, 71, 71, 1500, 2304)

CASES = [
    (CONFIG, Case(seq_len=4096, num_heads=16, num_kv_heads=2, head_dim=128)),
    (CONFIG, Case(seq_len=3001, num_heads=4, num_kv_heads=4, head_dim=64, batch=3, dtype=torch.float16)),
    (replace(CONFIG, num_probe_rows=37), Case(seq_len=2111, num_heads=12, num_kv_heads=1, head_dim=96, magnitude=2.0)),
    (replace(CONFIG, num_probe_rows=300), Case(seq_len=2050, num_heads=10, num_kv_heads=1, head_dim=128)),
    (PROBES, Case(seq_len=4096, num_heads=8, num_kv_heads=1, head_dim=128, batch=2)),
    (PROBES, Case(seq_len=2999, num_heads=6, num_kv_heads=2, head_dim=64, softmax_scale=0.3)),
    (CONFIG, Case(seq_len=3000, num_heads=4, num_kv_heads=2, head_dim=128, bounds=PACK)),
    (replace(PROBES, dense_below=800), Case(seq_len=3000, num_heads=4, num_kv_heads=1, head_dim=64, bounds=PACK)),
    (replace(CONFIG, max_vertical=0), Case(seq_len=1500, num_heads=2, num_kv_heads=1, head_dim=64)),
    (replace(CONFIG, max_slash=0, sink_tokens=0), Case(seq_len=1500, num_heads=2, num_kv_heads=1, head_dim=64)),
    (
        replace(CONFIG, vertical_top_p=1.0, slash_top_p=1.0, max_vertical=5000, max_slash=500),
        Case(seq_len=1500, num_heads=2, num_kv_heads=1, head_dim=64),
    ),
    (replace(CONFIG, sink_tokens=900, local_blocks=40), Case(seq_len=1500, num_heads=2, num_kv_heads=1, head_dim=64)),
    (SHARED, Case(seq_len=4096, num_heads=16, num_kv_heads=2, head_dim=128, batch=2)),
    (replace(SHARED, num_probe_rows=300), Case(seq_len=2050, num_heads=10, num_kv_heads=1, head_dim=128)),
    (
        replace(SHARED_PROBES, dense_below=800),
        Case(seq_len=3000, num_heads=6, num_kv_heads=2, head_dim=64, bounds=PACK),
    ),
    (replace(CONFIG, slash_run_length=2), Case(seq_len=4096, num_heads=16, num_kv_heads=2, head_dim=128)),
    (
        replace(SHARED_PROBES, slash_run_length=4),
        Case(seq_len=3000, num_heads=4, num_kv_heads=2, head_dim=64, bounds=PACK),
    ),
    (
        replace(CONFIG, slash_run_length=5, slash_top_p=1.0, max_slash=500),
        Case(seq_len=3001, num_heads=2, num_kv_heads=1, head_dim=64),
    ),
    (replace(CONFIG, num_probe_rows=100), Case(seq_len=3000, num_heads=4, num_kv_heads=2, head_dim=128)),
    (
        replace(CONFIG, num_probe_rows=250),
        Case(seq_len=2999, num_heads=6, num_kv_heads=1, head_dim=64, dtype=torch.float16),
    ),
    (replace(CONFIG, num_probe_rows=320), Case(seq_len=2050, num_heads=4, num_kv_heads=2, head_dim=96, batch=2)),
    (
        replace(SHARED, num_probe_rows=321),
        Case(seq_len=2111, num_heads=4, num_kv_heads=1, head_dim=128, dtype=torch.float16),
    ),
    (replace(CONFIG, num_probe_rows=512), Case(seq_len=4096, num_heads=16, num_kv_heads=2, head_dim=128)),
    (
        replace(CONFIG, num_probe_rows=777),
        Case(seq_len=3001, num_heads=4, num_kv_heads=2, head_dim=96, dtype=torch.float16),
    ),
    (replace(CONFIG, num_probe_rows=1024), Case(seq_len=4100, num_heads=4, num_kv_heads=1, head_dim=128)),
    (
        replace(PROBES, num_probe_rows=512, num_probe_windows=64),
        Case(seq_len=4111, num_heads=8, num_kv_heads=2, head_dim=128, magnitude=2.0),
    ),
    (
        replace(SHARED_PROBES, num_probe_rows=1024, num_probe_windows=32, slash_run_length=4, dense_below=800),
        Case(seq_len=3000, num_heads=4, num_kv_heads=2, head_dim=64, bounds=PACK),
    ),
    (
        replace(PROBES, num_probe_rows=320, num_probe_windows=64),
        Case(seq_len=2700, num_heads=2, num_kv_heads=2, head_dim=96),
    ),
    (
        replace(CONFIG, num_probe_rows=64),
        Case(seq_len=4096, num_heads=4, num_kv_heads=2, head_dim=128, softmax_scale=4.0),
    ),
    (FIXED, Case(seq_len=3000, num_heads=4, num_kv_heads=2, head_dim=64, bounds=PACK)),
    (COST, Case(seq_len=4096, num_heads=16, num_kv_heads=2, head_dim=128)),
    (replace(COST, dense_above=0.4), Case(seq_len=3001, num_heads=4, num_kv_heads=4, head_dim=64, batch=3)),
    (replace(COST, dense_above=0.15), Case(seq_len=3000, num_heads=4, num_kv_heads=2, head_dim=64, bounds=PACK)),
    (
        replace(COST, num_probe_rows=512, num_probe_windows=64),
        Case(seq_len=4111, num_heads=4, num_kv_heads=1, head_dim=96),
    ),
    (
        replace(COST, target_recall=1.0),
        Case(seq_len=2111, num_heads=2, num_kv_heads=1, head_dim=128, dtype=torch.float16),
    ),
    (
        replace(COST, target_recall=0.3, estimator="last_window"),
        Case(seq_len=3000, num_heads=4, num_kv_heads=2, head_dim=64),
    ),
    (replace(COST, target_recall=0.05, sink_tokens=0), Case(seq_len=1500, num_heads=2, num_kv_heads=1, head_dim=64)),
    (SHARED_COST, Case(seq_len=4096, num_heads=16, num_kv_heads=2, head_dim=128, batch=2)),
    (
        replace(SHARED_COST, num_probe_rows=777, estimator="last_window", dense_below=800),
        Case(seq_len=3000, num_heads=6, num_kv_heads=2, head_dim=96, dtype=torch.float16, bounds=PACK),
    ),
    (replace(COST, sink_tokens=900, local_blocks=40), Case(seq_len=1500, num_heads=2, num_kv_heads=1, head_dim=64)),
    (
        replace(COST, num_probe_windows=64, target_recall=0.95),
        Case(seq_len=4096, num_heads=4, num_kv_heads=2, head_dim=64),
    ),
    (  # halves of unlike size: windows of 80 rows are 64 of a block and 16 of another
        replace(COST, num_probe_rows=640, index_sharing="kv_group"),
        Case(seq_len=4000, num_heads=4, num_kv_heads=2, head_dim=96, dtype=torch.float16),
    ),
    (
        replace(COST, num_probe_rows=63, num_probe_windows=7),
        Case(seq_len=3000, num_heads=2, num_kv_heads=2, head_dim=64, bounds=PACK),
    ),
    (COST, Case(seq_len=40, num_heads=2, num_kv_heads=2, head_dim=128)),
    (CONFIG, Case(seq_len=1, num_heads=2, num_kv_heads=1, head_dim=64)),
    (CONFIG, Case(seq_len=40, num_heads=2, num_kv_heads=2, head_dim=128)),
]


def select_nan_filled(config, case, query, key):
    """The index by the kernels, whose scratch holds NaN before."""
    with nan_filled_empty():
        return select(query, key, config, softmax_scale=case.scale, cu_seqlens=case.cu_seqlens)


def same_bits(one, other) -> bool:
    """Whether two indices agree in every entry."""
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def inputs_of(config, case):
    """Random query and key; for the budget cost with columns and distances that stand out, so that it selects both."""
    query, key, _ = case.inputs()
    if config.budget != "cost":
        return query, key
    blocks = -(-case.seq_len // BLOCK)
    feature = torch.randn(blocks + 40, case.head_dim, device="cuda")
    block = torch.arange(case.seq_len, device="cuda") // BLOCK
    key[:] = (key.float() * 0.3 + feature[block + 40][:, None]).to(case.dtype)
    common = torch.randn(case.head_dim, device="cuda")
    wanted = [feature[block + 40 - distance] * strength for distance, strength in ((4, 0.5), (11, 0.4), (33, 0.3))]
    query[:] = (query.float() * 0.3 + torch.stack(wanted).sum(0)[:, None] + 0.3 * common).to(case.dtype)
    columns = torch.randperm(case.seq_len, device="cuda")[: case.seq_len // 40]
    key[:, columns] += (2 * common * torch.rand(len(columns), 1, 1, device="cuda")).to(case.dtype)
    return query, key


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A test that fell back to the reference would prove nothing; those that want it ask for it by name."""

    def refuse(task):
        assert task.config.backend == "reference"
        return score(task)

    score = reference.score
    monkeypatch.setattr(reference, "score", refuse)


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(("config", "case"), CASES, ids=[f"{number}-{case}" for number, (_, case) in enumerate(CASES)])
def test_lists_hold_the_budget_on_exact_masses(config, case):
    query, key = inputs_of(config, case)
    index = select_nan_filled(config, case, query, key)
    check_lists(index, query, key, config, softmax_scale=case.scale, bounds=case.bounds)
    assert same_bits(index, select_nan_filled(config, case, query, key))


def separated_inputs(seq_len, *, heads=(4, 2), dtype=torch.bfloat16):
    """All rows of a head ask for the same, and the keys' scores are a shuffle of an even grid: exact in 16 bits."""
    levels = torch.stack([torch.randperm(seq_len, device="cuda") for _ in range(heads[1])], dim=1)
    key = torch.zeros(1, seq_len, heads[1], 64, device="cuda")
    key[0, ..., 0], key[0, ..., 1] = levels // 64, levels % 64
    query = torch.zeros(1, seq_len, heads[0], 64, device="cuda")
    step = 2.0 ** torch.arange(heads[0], device="cuda")
    query[..., 0], query[..., 1] = 64 * step, step
    return query.to(dtype), key.to(dtype)


@pytest.mark.parametrize("estimator", ["last_window", "probe_windows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seq_len", [2048, 3333])
@pytest.mark.parametrize("index_sharing", INDEX_SHARINGS)
def test_separated_masses_give_the_lists_of_float64(estimator, dtype, seq_len, index_sharing):
    query, key = separated_inputs(seq_len, dtype=dtype)
    changes = {"estimator": estimator, "num_probe_windows": 8, "index_sharing": index_sharing, "vertical_top_p": 0.3}
    config = replace(CONFIG, **changes)
    index = select(query, key, config, softmax_scale=2.0**-9)
    exact = select(query.double(), key.double(), replace(config, backend="reference"), softmax_scale=2.0**-9)
    assert same_bits(index, exact)
    assert int(index.num_vertical.min()) > 5 and int(index.num_slash.min()) > 2


@pytest.mark.parametrize(
    ("config", "num_valid"),
    [
        (COST, None),
        (replace(COST, target_recall=0.5, estimator="last_window"), None),
        (replace(SHARED_COST, target_recall=0.6, dense_above=0.4), None),
        (replace(COST, num_probe_rows=256, num_probe_windows=64), 1500),
        (replace(COST, max_density=0.2), None),
        (replace(SHARED_COST, max_density=0.3, target_recall=0.6), 1777),
    ],
    ids=["cost", "last-window", "dense", "padding", "density", "density-shared-padding"],
)
def test_separated_masses_give_the_lists_of_float64_by_cost(config, num_valid):
    query, key = separated_inputs(2048)
    key[:, ::29] *= 1.5
    rest = {"num_valid": None if num_valid is None else torch.tensor([num_valid], dtype=torch.int32, device="cuda")}
    index = select(query, key, config, softmax_scale=2.0**-9, **rest)
    exact = select(query.double(), key.double(), replace(config, backend="reference"), softmax_scale=2.0**-9, **rest)
    assert same_bits(index, exact)
    assert int((index.num_vertical + index.num_slash).max()) > config.sink_tokens + config.local_blocks


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("index_sharing", INDEX_SHARINGS)
def test_a_key_that_one_window_alone_sees_is_no_column(index_sharing):
    """Rows of the sixth of eight windows look at key 300, all rows at key 400. Two windows have no halves."""
    query, key = (torch.zeros(1, 2048, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    query[..., 0] = 1
    key[:, 400, :, 0] = 12
    config = replace(COST, target_recall=0.9, index_sharing=index_sharing)
    for windows, rows, columns in ((8, slice(1528, 1536), [400]), (2, slice(992, 1024), [300, 400])):
        query[:, rows, :, 1] = 1
        key[:, 300, :, 1] = 24
        config = replace(config, num_probe_windows=windows)
        index = select(query, key, config, softmax_scale=1.0)
        exact = select(query.double(), key.double(), replace(config, backend="reference"), softmax_scale=1.0)
        assert same_bits(index, exact)
        assert index.vertical[0, 0, : index.num_vertical[0, 0]].tolist() == [0, 1, 2, 3, 4, *columns]
        query[:, rows, :, 1] = 0


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("config", [CONFIG, SHARED_PROBES], ids=["last-window", "shared-windows"])
def test_what_columns_hold_is_no_mass_of_a_distance(config, head_dim, dtype):
    """The difference of two sums in float32: of all keys, and of columns one by one. Here all keys are columns."""
    query, key, _ = Case(seq_len=4500, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype).inputs()
    config = replace(config, vertical_top_p=1.0, max_vertical=4500, slash_top_p=1.0, max_slash=500)
    index = select(query, key, config)
    assert (index.num_vertical > 4000).all() and (index.num_slash == config.local_blocks).all()


def test_max_density_bounds_the_pairs_of_the_layer():
    config, case = COST, Case(seq_len=4096, num_heads=16, num_kv_heads=2, head_dim=128)
    query, key = inputs_of(config, case)
    causal = case.seq_len * (case.seq_len + 1) // 2
    for density in (0.9, 0.3, 0.1):
        index = select(query, key, replace(config, max_density=density))
        columns = (case.seq_len - index.vertical.long()).sum(dim=2)
        distances = ((case.seq_len // BLOCK - index.slash.long()) * BLOCK**2).sum(dim=2)
        assert int((columns + distances).clamp(max=causal).sum()) <= density * 16 * causal
    unbounded = select(query, key, config)
    assert same_bits(select(query, key, replace(config, max_density=1.0)), unbounded)
    assert (index.num_vertical + index.num_slash < unbounded.num_vertical + unbounded.num_slash).any()


def test_a_list_of_too_many_pairs_becomes_dense():
    query, key, _ = Case(seq_len=4096, num_heads=4, num_kv_heads=2, head_dim=128).inputs()
    index = select(query, key, replace(COST, target_recall=0.95, dense_above=0.4))
    assert (index.num_vertical == 0).all() and (index.num_slash == 4096 // BLOCK).all()
    assert (index.vertical == 4096).all() and torch.equal(index.slash[0, 0].long(), torch.arange(64, device="cuda"))


def test_equal_scores_break_ties_to_the_lower_position():
    key = torch.randn(1, 2000, 2, 64, device="cuda", dtype=torch.bfloat16)
    query = torch.zeros(1, 2000, 4, 64, device="cuda", dtype=torch.bfloat16)
    config = replace(CONFIG, vertical_top_p=0.05, max_vertical=60, slash_top_p=1.0, max_slash=3)
    index = select(query, key, config)
    for head in range(4):
        assert index.vertical[0, head].tolist() == list(range(65))
        assert index.slash[0, head].tolist() == list(range(5))


def test_equal_keys_far_apart_break_ties_to_the_lower_position():
    """The heaviest key is at many positions, in every lane and register of a fragment; the cap cuts through them."""
    query, key, _ = Case(seq_len=4096, num_heads=4, num_kv_heads=1, head_dim=128).inputs()
    positions = torch.randperm(3900, device="cuda")[:300].sort().values + 20
    query[:] = query[:, -1:]
    key[:, positions] = 3 * query[:, -1:, :1]
    config = replace(CONFIG, vertical_top_p=1.0, max_vertical=150)
    index = select(query, key, config)
    assert torch.equal(index.vertical[0, 0, 5:].long(), positions[:150])
    by_cost = replace(COST, estimator="last_window", target_recall=0.4983)  # 149.49 of 300 equal masses
    index = select(query, key, by_cost)
    assert torch.equal(index.vertical[0, 0, 5:155].long(), positions[:150]) and index.num_vertical[0, 0] == 155
    index = select(query, key, replace(by_cost, target_recall=0.99))  # more than the cap, a column for 16 tokens
    assert torch.equal(index.vertical[0, 0, 5:].long(), positions[:256]) and index.num_vertical[0, 0] == 261


RANKS = [
    ("contiguous", 3, CONFIG, Case(seq_len=1536, num_heads=4, num_kv_heads=2, head_dim=128)),
    ("zigzag", 4, CONFIG, Case(seq_len=2048, num_heads=6, num_kv_heads=1, head_dim=64, batch=2)),
    ("striped", 4, PROBES, Case(seq_len=2048, num_heads=16, num_kv_heads=2, head_dim=128)),
    ("rotated", 5, CONFIG, Case(seq_len=1600, num_heads=2, num_kv_heads=2, head_dim=96, dtype=torch.float16)),
    ("striped", 8, CONFIG, Case(seq_len=1024, num_heads=3, num_kv_heads=1, head_dim=64)),
    ("striped", 3, CONFIG, Case(seq_len=2304, num_heads=4, num_kv_heads=2, head_dim=128, bounds=BLOCKS_OF_THREE)),
    ("zigzag", 4, SHARED, Case(seq_len=2048, num_heads=6, num_kv_heads=2, head_dim=64, batch=2)),
    (
        "rotated",
        3,
        SHARED_PROBES,
        Case(seq_len=2304, num_heads=8, num_kv_heads=1, head_dim=128, bounds=BLOCKS_OF_THREE),
    ),
    ("striped", 4, replace(CONFIG, slash_run_length=4), Case(seq_len=2048, num_heads=6, num_kv_heads=2, head_dim=64)),
    ("striped", 3, replace(CONFIG, num_probe_rows=777), Case(seq_len=2304, num_heads=4, num_kv_heads=2, head_dim=128)),
    (
        "zigzag",
        2,
        replace(SHARED_PROBES, num_probe_rows=512, num_probe_windows=64),
        Case(seq_len=2304, num_heads=4, num_kv_heads=2, head_dim=96, dtype=torch.float16),
    ),
    ("contiguous", 3, COST, Case(seq_len=1536, num_heads=4, num_kv_heads=2, head_dim=128)),
    (
        "striped",
        4,
        replace(COST, max_density=0.2),
        Case(seq_len=2048, num_heads=6, num_kv_heads=1, head_dim=64, batch=2),
    ),
    (
        "striped",
        3,
        replace(COST, num_probe_rows=63, num_probe_windows=7, max_density=0.3),
        Case(seq_len=2304, num_heads=4, num_kv_heads=2, head_dim=128, bounds=BLOCKS_OF_THREE),
    ),
    (
        "rotated",
        2,
        replace(SHARED_COST, num_probe_rows=512, num_probe_windows=64, dense_above=0.4),
        Case(seq_len=2304, num_heads=8, num_kv_heads=2, head_dim=96, dtype=torch.float16, bounds=BLOCKS_OF_THREE),
    ),
    ("zigzag", 4, replace(COST, target_recall=1.0), Case(seq_len=2048, num_heads=2, num_kv_heads=2, head_dim=128)),
    ("zigzag", 3, PROBES, Case(seq_len=2304, num_heads=4, num_kv_heads=2, head_dim=64, bounds=BLOCKS_OF_THREE)),
]


@pytest.mark.parametrize("scratch", [2**23, 20000], ids=["one-wave", "waves"])
@pytest.mark.parametrize(("kind", "cp_size", "config", "case"), RANKS)
def test_ranks_choose_the_bits_of_one_device(kind, cp_size, config, case, scratch, monkeypatch):
    query, key = inputs_of(config, case)
    alone = select_nan_filled(config, case, query, key)
    if config.max_density is None:
        check_lists(alone, query, key, config, softmax_scale=case.scale, bounds=case.bounds)
    monkeypatch.setattr("megatron_mtraining.selection.estimators.SCRATCH_ELEMENTS", scratch)
    layout = SequenceLayout(kind, seq_len=case.seq_len, cp_size=cp_size)

    def body(group):
        local = [shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key)]
        return select(*local, config, softmax_scale=case.scale, cu_seqlens=case.cu_seqlens, layout=layout, groups=group)

    assert all(same_bits(index, alone) for index in RankSimulator(cp_size).run(body))


@pytest.mark.parametrize("scratch", [20000, 2])
def test_waves_change_nothing(scratch, monkeypatch):
    config, case = CASES[4]
    query, key, _ = case.inputs()
    expected = select_nan_filled(config, case, query, key)
    monkeypatch.setattr("megatron_mtraining.selection.estimators.SCRATCH_ELEMENTS", scratch)
    assert same_bits(select_nan_filled(config, case, query, key), expected)


def test_strided_and_unaligned_input_change_nothing():
    config, case = CASES[0]
    query, key, _ = case.inputs()
    expected = select_nan_filled(config, case, query, key)
    strided = [torch.stack((each, each + 1), dim=-1)[..., 0] for each in (query, key)]
    assert same_bits(select_nan_filled(config, case, *strided), expected)
    packed = torch.cat((query, key), dim=2)
    assert same_bits(select_nan_filled(config, case, packed[:, :, :16], packed[:, :, 16:]), expected)


@pytest.mark.parametrize("config", [CONFIG, COST], ids=["top_p", "cost"])
def test_numbers_that_are_none_choose_nothing_out_of_range(config):
    case = CASES[0][1]
    query, key, _ = case.inputs()
    for poison in (float("nan"), float("inf")):
        spoiled = key.clone()
        spoiled[:, 100] = poison
        index = select_nan_filled(config, case, query, spoiled)
        assert (index.vertical <= case.seq_len).all() and (index.slash <= case.seq_len // 64).all()
        assert (index.vertical.diff(dim=2) >= 0).all() and (index.slash.diff(dim=2) >= 0).all()


@pytest.mark.parametrize("config", [CONFIG, COST, replace(COST, max_density=0.2)], ids=["top_p", "cost", "density"])
def test_the_device_never_makes_the_host_wait(config):
    case = CASES[0][1]
    query, key, _ = case.inputs()
    select(query, key, config)
    torch.cuda.set_sync_debug_mode("error")
    try:
        select(query, key, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("config", [CONFIG, COST], ids=["top_p", "cost"])
def test_a_selection_is_some_ten_launches(config):
    query, key, _ = CASES[0][1].inputs()
    select(query, key, config)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        select(query, key, config)
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 8 <= len(on_device) <= 14


def test_what_the_kernels_do_not_take_is_the_references():
    config, case = CASES[0]
    query, key, _ = case.inputs()
    reference_config = replace(config, backend="reference")
    index = select(query, key, reference_config, softmax_scale=case.scale)
    check_lists(index, query, key, reference_config, softmax_scale=case.scale)


@pytest.mark.parametrize("config", [CONFIG, replace(COST, max_density=0.2)], ids=["top_p", "cost"])
def test_operators_pass_opcheck(config):
    from megatron_mtraining.backends.cuda import probe_operators as passes

    query, key, _ = Case(seq_len=1024, num_heads=4, num_kv_heads=2, head_dim=64).inputs()
    layout, calls = SequenceLayout("striped", seq_len=1024, cp_size=2), {}

    def recording(name, operator):
        def call(*arguments):
            calls.setdefault(name, arguments)
            operator(*arguments)

        return call

    def body(group):
        local = [shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key)]
        return select(*local, config, layout=layout, groups=group)

    names = (
        *("probe_sums", "merge_sums", "weights_of_parts", "probe_weights", "probe_mass"),
        *("choose_verticals", "probe_columns", "choose_slashes"),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(passes, name, recording(name, getattr(passes, name)))
        select(query, key, config)
        RankSimulator(2).run(body)
    for name in names:
        torch.library.opcheck(getattr(passes, name), calls[name])
