"""Whatever a model is spread over, by Megatron's own means, it trains as on one rank: losses and gradient norms."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest

from .composition import Combination, Model, train_all
from .ranks import run_on_ranks

PACKS = Model(packed=True, dense_below=60)
FEW = Model(num_rows=2)
DENSE_PHASES = Model(num_rows=2, dense_layers=(2,), dense_warmup_steps=1)
EXPERTS = Model(num_rows=2, num_experts=4)
PADDED = Model(padded=True)
SHARED = Model(num_rows=2, index_sharing="kv_group", num_kv_heads=2)

ON_FOUR_RANKS = {
    "tp-cp-shared-index": Combination(tp=2, cp=2, model=SHARED),
    "tp-sp-cp": Combination(tp=2, cp=2, sequence_parallel=True, layout="rotated"),
    "pp-cp-full-recompute": Combination(pp=2, cp=2, recompute="full", layout="zigzag"),
    "interleaved-pp-cp-packs": Combination(pp=2, vpp=2, cp=2, model=PACKS),
    "interleaved-pp-cp-padded-recompute": Combination(pp=2, vpp=2, cp=2, recompute="full", model=PADDED),
    "pp-tp-padded-selective-recompute": Combination(pp=2, tp=2, recompute="selective", model=PADDED),
    "dp-cp-distributed-optimizer": Combination(cp=2, distributed_optimizer=True, schedule="gather"),
    "cp-selective-recompute-dense-phases": Combination(
        cp=4, recompute="selective", layout="node_striped", model=DENSE_PHASES
    ),
    "ep-cp": Combination(ep=4, cp=4, model=EXPERTS),
    "tp-sp-ep-cp": Combination(tp=2, ep=2, cp=2, sequence_parallel=True, model=EXPERTS),
}

ON_GPUS = {
    "tp-sp": (2, Combination(tp=2, sequence_parallel=True)),
    "pp-full-recompute": (2, Combination(pp=2, recompute="full")),
    "cp-overlap": (2, Combination(cp=2, distributed_optimizer=True, overlap=True)),
    "tp-sp-cp": (4, Combination(tp=2, cp=2, sequence_parallel=True)),
    "dp-cp-overlap": (4, Combination(cp=2, distributed_optimizer=True, overlap=True)),
}
"""Numbers of GPUs, and what runs there with TransformerEngine's layers over NCCL."""

Steps = list[tuple[float | None, float]]


@functools.cache
def on_one_rank(transformer_engine: bool = False) -> dict[Model, Steps]:
    combinations = [
        Combination(transformer_engine=transformer_engine, model=model)
        for model in (
            (Model(),) if transformer_engine else (Model(), PACKS, FEW, DENSE_PHASES, EXPERTS, SHARED, PADDED)
        )
    ]
    (runs,) = run_on_ranks(train_all, 1, combinations=combinations)
    return {combination.model: run for combination, run in zip(combinations, runs, strict=True)}


@functools.cache
def rounding_of(model: Model) -> float:
    """The greatest relative change of a loss or gradient norm when every weight moves by one unit of its rounding."""
    ((nudged,),) = run_on_ranks(train_all, 1, combinations=[Combination(model=model, nudged=True)])
    pairs = zip(itertools.chain(*nudged), itertools.chain(*on_one_rank()[model]), strict=True)
    return max(abs(moved / plain - 1.0) for moved, plain in pairs)


@functools.cache
def on_four_ranks() -> dict[str, list[Steps]]:
    by_rank = run_on_ranks(train_all, 4, combinations=list(ON_FOUR_RANKS.values()))
    return {name: [runs[i] for runs in by_rank] for i, name in enumerate(ON_FOUR_RANKS)}


def assert_same(by_rank: list[Steps], expected: Steps, rounding: float = 0.0) -> None:
    """Losses within 2e-6 and norms within 1e-5, or where rounding does more, within ten times as much as it does."""
    losses = {rank: [loss for loss, _ in run] for rank, run in enumerate(by_rank)}
    assert any(None not in of_rank for of_rank in losses.values())
    for rank, run in enumerate(by_rank):
        for (loss, norm), (expected_loss, expected_norm) in zip(run, expected, strict=True):
            assert loss is None or loss == pytest.approx(expected_loss, rel=max(2e-6, 10 * rounding)), f"rank {rank}"
            assert norm == pytest.approx(expected_norm, rel=max(1e-5, 10 * rounding)), f"rank {rank}"


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_training_is_that_of_one_rank(name: str):
    model = ON_FOUR_RANKS[name].model
    # Experts are chosen by scores that are close to each other, so a model of them feels rounding most.
    assert_same(on_four_ranks()[name], on_one_rank()[model], rounding_of(model) if model.num_experts else 0.0)


def test_the_models_differ():
    """Else the comparison could not see dense phases, experts or documents."""
    runs = on_one_rank()
    assert len({(model.num_rows, round(run[1][0], 4)) for model, run in runs.items()}) == len(runs)


@pytest.mark.parametrize(
    ("num_ranks", "combination"),
    [pytest.param(*case, marks=pytest.mark.multi_gpu(case[0]), id=name) for name, case in ON_GPUS.items()],
)
def test_training_with_transformer_engine_is_that_of_one_rank(num_ranks: int, combination: Combination):
    pytest.importorskip("transformer_engine")
    combination = dataclasses.replace(combination, transformer_engine=True)
    runs: list[Any] = run_on_ranks(train_all, num_ranks, combinations=[combination])
    assert_same([run[0] for run in runs], on_one_rank(True)[combination.model])
