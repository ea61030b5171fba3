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

from .cases import Case
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
def test_lists_keep_the_budget_on_exact_masses(config, case):
    query, key, _ = case.inputs()
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
    config = replace(CONFIG, estimator=estimator, index_sharing=index_sharing, vertical_top_p=0.3)
    index = select(query, key, config, softmax_scale=2.0**-9)
    exact = select(query.double(), key.double(), replace(config, backend="reference"), softmax_scale=2.0**-9)
    assert same_bits(index, exact)
    assert int(index.num_vertical.min()) > 5 and int(index.num_slash.min()) > 2


def test_equal_scores_break_ties_to_the_lower_position():
    key = torch.randn(1, 2000, 2, 64, device="cuda", dtype=torch.bfloat16)
    query = torch.zeros(1, 2000, 4, 64, device="cuda", dtype=torch.bfloat16)
    config = replace(CONFIG, vertical_top_p=0.05, max_vertical=60, slash_top_p=1.0, max_slash=3)
    index = select(query, key, config)
    for head in range(4):
        assert index.vertical[0, head].tolist() == list(range(65))
        assert index.slash[0, head].tolist() == list(range(5))


def test_equal_keys_far_apart_break_ties_to_the_lower_position():
    """The heaviest key stands at many places, in every lane and register of a fragment; the cap cuts through them."""
    query, key, _ = Case(seq_len=4096, num_heads=4, num_kv_heads=1, head_dim=128).inputs()
    places = torch.randperm(3900, device="cuda")[:300].sort().values + 20
    query[:] = query[:, -1:]
    key[:, places] = 3 * query[:, -1:, :1]
    config = replace(CONFIG, vertical_top_p=1.0, max_vertical=150)
    index = select(query, key, config)
    assert torch.equal(index.vertical[0, 0, 5:].long(), places[:150])


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
    ("zigzag", 3, PROBES, Case(seq_len=2304, num_heads=4, num_kv_heads=2, head_dim=64, bounds=BLOCKS_OF_THREE)),
]


@pytest.mark.parametrize("scratch", [2**23, 20000], ids=["one-wave", "waves"])
@pytest.mark.parametrize(("kind", "cp_size", "config", "case"), RANKS)
def test_ranks_choose_the_bits_of_one_device(kind, cp_size, config, case, scratch, monkeypatch):
    query, key, _ = case.inputs()
    alone = select_nan_filled(config, case, query, key)
    check_lists(alone, query, key, config, softmax_scale=case.scale, bounds=case.bounds)
    monkeypatch.setattr("megatron_mtraining.selection.task.SCRATCH_ELEMENTS", scratch)
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
    monkeypatch.setattr("megatron_mtraining.selection.task.SCRATCH_ELEMENTS", scratch)
    assert same_bits(select_nan_filled(config, case, query, key), expected)


def test_strided_and_unaligned_input_change_nothing():
    config, case = CASES[0]
    query, key, _ = case.inputs()
    expected = select_nan_filled(config, case, query, key)
    strided = [torch.stack((each, each + 1), dim=-1)[..., 0] for each in (query, key)]
    assert same_bits(select_nan_filled(config, case, *strided), expected)
    packed = torch.cat((query, key), dim=2)
    assert same_bits(select_nan_filled(config, case, packed[:, :, :16], packed[:, :, 16:]), expected)


def test_numbers_that_are_none_choose_nothing_out_of_range():
    config, case = CASES[0]
    query, key, _ = case.inputs()
    for poison in (float("nan"), float("inf")):
        spoiled = key.clone()
        spoiled[:, 100] = poison
        index = select_nan_filled(config, case, query, spoiled)
        assert (index.vertical <= case.seq_len).all() and (index.slash <= case.seq_len // 64).all()
        assert (index.vertical.diff(dim=2) >= 0).all() and (index.slash.diff(dim=2) >= 0).all()


def test_the_device_never_makes_the_host_wait():
    config, case = CASES[0]
    query, key, _ = case.inputs()
    select(query, key, config)
    torch.cuda.set_sync_debug_mode("error")
    try:
        select(query, key, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_selection_is_some_fifteen_launches():
    config, case = CASES[0]
    query, key, _ = case.inputs()
    select(query, key, config)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        select(query, key, config)
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 10 <= len(on_device) <= 17


def test_what_the_kernels_do_not_take_is_the_references():
    config, case = CASES[0]
    query, key, _ = case.inputs()
    reference_config = replace(config, backend="reference")
    index = select(query, key, reference_config, softmax_scale=case.scale)
    check_lists(index, query, key, reference_config, softmax_scale=case.scale)


def test_operators_pass_opcheck():
    from megatron_mtraining.backends.cuda import probe_operators as passes

    config, case = CASES[0]
    query, key, _ = case.inputs()
    calls = {}

    def recording(name, operator):
        def call(*arguments):
            calls.setdefault(name, arguments)
            operator(*arguments)

        return call

    names = (
        *("probe_sums", "merge_sums", "probe_weights", "probe_mass"),
        *("choose_verticals", "probe_distances", "choose_slashes"),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(passes, name, recording(name, getattr(passes, name)))
        select(query, key, config)
    for name in names:
        torch.library.opcheck(getattr(passes, name), calls[name])
