"""A GPTModel over context-parallel ranks computes what it computes on one: loss, every gradient, every index."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_mtraining.config import LAYOUTS, MTrainingConfig
from megatron_mtraining.types import AttentionIndex, BlockListIndex

from . import tiny_gpt
from .ranks import run_on_ranks

TOLERANCE = 1e-10
"""For float64: three orders above what rounding does to sums of this size."""


YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 48,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
"""Attributes that GPTModel reads off the config for YaRN positions; the factor changes the angles and their scale."""


class Case(NamedTuple):
    """One way to spread the model over ranks, and one way to build it."""

    layout: str = "striped"
    schedule: str = "hierarchical"
    inner_size: int = 2
    tp_size: int = 1
    batch_size: int = 1
    estimator: str = "last_window"
    dense_layers: tuple[int, ...] = ()
    positions: str = "rope"
    pattern: str = "vertical_slash"


class Run(NamedTuple):
    """What a rank saw."""

    loss: float
    gradients: dict[str, Tensor]
    indices: dict[int, AttentionIndex]


def config_of(case: Case) -> MTrainingConfig:
    names = ("layout", "schedule", "estimator", "dense_layers", "pattern")
    sizes = {"xattention_block": 16, "xattention_stride": 4, "xattention_threshold": 0.5}
    return dataclasses.replace(tiny_gpt.SPARSE, **sizes, **{name: getattr(case, name) for name in names})


def run_cases(cases: list[Case], cp_size: int) -> list[Run]:
    """On one rank of several: each case in a job of its own."""
    return [run_case(case, cp_size) for case in cases]


def run_case(case: Case, cp_size: int) -> Run:
    from megatron_mtraining import megatron as mtraining

    config, inner_size = config_of(case), case.inner_size if cp_size > 1 else 1
    with tiny_gpt.parallel_job(config, cp_size=cp_size, tp_size=case.tp_size, inner_size=inner_size):
        transformer = tiny_gpt.transformer_config()
        if case.positions == "yarn":
            vars(transformer).update(YARN)
        model = tiny_gpt.build(tiny_gpt.sparse_spec(), config=transformer, position_embedding_type=case.positions)
        whole = tiny_gpt.batch(batch_size=case.batch_size)
        with mtraining.record_attention() as recorder:
            loss, gradients = tiny_gpt.loss_and_gradients(model.double(), whole, config)
        return Run(loss, gradients, {layer: record.index.to("cpu") for layer, record in recorder.layers.items()})


@functools.cache
def on_one_rank(**changes: Any) -> list[Run]:
    """The runs of every tensor-parallel rank without context parallelism."""
    case = Case(**changes)
    return [runs[0] for runs in run_on_ranks(run_cases, case.tp_size, cases=[case], cp_size=1)]


def assert_same(run: Run, expected: Run) -> None:
    assert run.loss == pytest.approx(expected.loss, abs=TOLERANCE)
    assert run.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient to compare"
        torch.testing.assert_close(run.gradients[name], gradient, atol=TOLERANCE, rtol=0, msg=name)
    assert run.indices.keys() == expected.indices.keys()
    for layer, index in expected.indices.items():
        if isinstance(index, BlockListIndex):  # each rank has lists of its own
            continue
        for name in ("vertical", "num_vertical", "slash", "num_slash"):
            assert torch.equal(getattr(run.indices[layer], name), getattr(index, name)), f"layer {layer}: {name}"


FOUR_RANKS = [Case(layout=layout) for layout in LAYOUTS] + [
    Case(schedule="flat"),
    Case(schedule="gather"),
    Case(layout="zigzag", schedule="gather"),
]
"""Each layout and each schedule; their product is tested over threads, without Megatron."""


@functools.cache
def on_four_ranks() -> dict[Case, list[Run]]:
    by_rank = run_on_ranks(run_cases, 4, cases=FOUR_RANKS, cp_size=4)
    return {case: [runs[i] for runs in by_rank] for i, case in enumerate(FOUR_RANKS)}


@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda case: f"{case.layout}-{case.schedule}")
def test_four_ranks_compute_what_one_does(case: Case):
    (expected,) = on_one_rank()
    for run in on_four_ranks()[case]:
        assert_same(run, expected)


def test_the_model_under_test_is_sparse():
    (sparse,), (dense,) = on_one_rank(), on_one_rank(dense_layers=(1, 2))
    assert abs(sparse.loss - dense.loss) > 1e-4
    assert set(dense.indices[1].num_slash.flatten().tolist()) == {tiny_gpt.SEQ_LEN // 8}
    assert all(index.num_slash.max() <= 5 for index in sparse.indices.values())


OTHERS = {
    "three": (3, Case(inner_size=1)),
    "three-zigzag": (3, Case(inner_size=3, layout="zigzag", schedule="gather")),
    "two-rows": (2, Case(inner_size=2, batch_size=2, layout="rotated")),
    "probe-windows": (2, Case(inner_size=1, estimator="probe_windows")),
    "one-dense-layer": (2, Case(inner_size=2, dense_layers=(2,))),
    "xattention": (2, Case(inner_size=1, pattern="xattention")),
    "yarn": (4, Case(positions="yarn")),
    "yarn-zigzag": (4, Case(positions="yarn", layout="zigzag")),
}
"""Context-parallel ranks and what runs on them."""


@functools.cache
def others_on(cp_size: int) -> dict[Case, list[Run]]:
    cases = [case for size, case in OTHERS.values() if size == cp_size]
    by_rank = run_on_ranks(run_cases, cp_size, cases=cases, cp_size=cp_size)
    return {case: [runs[i] for runs in by_rank] for i, case in enumerate(cases)}


@functools.cache
def others_on_one_rank() -> dict[Case, Run]:
    cases = list(dict.fromkeys(on_one(case) for _, case in OTHERS.values()))
    (runs,) = run_on_ranks(run_cases, 1, cases=cases, cp_size=1)
    return dict(zip(cases, runs, strict=True))


def on_one(case: Case) -> Case:
    """The same model, not spread over ranks."""
    return case._replace(inner_size=Case().inner_size, layout=Case().layout, schedule=Case().schedule)


@pytest.mark.parametrize("name", OTHERS)
def test_other_sizes_and_models(name: str):
    cp_size, case = OTHERS[name]
    for run in others_on(cp_size)[case]:
        assert_same(run, others_on_one_rank()[on_one(case)])


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_tensor_parallel_ranks_form_strided_context_parallel_groups(layout: str):
    expected = on_one_rank(tp_size=2)
    case = Case(layout=layout, tp_size=2, inner_size=2)
    for rank, (run,) in enumerate(run_on_ranks(run_cases, 4, cases=[case], cp_size=2)):
        assert_same(run, expected[rank % 2])


def test_two_data_parallel_groups_ring_separately():
    """Both context-parallel groups of a job of four compute the same batch, each by itself."""
    (expected,) = on_one_rank()
    for (run,) in run_on_ranks(run_cases, 4, cases=[Case(inner_size=1)], cp_size=2):
        assert_same(run, expected)
