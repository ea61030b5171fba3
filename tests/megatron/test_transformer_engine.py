"""The TransformerEngine layer spec over NCCL: the same losses on several ranks as on one, and the same checkpoints."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from . import tiny_gpt
from .ranks import run_on_ranks

pytestmark = [
    pytest.mark.multi_gpu(2),
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="TransformerEngine is not installed"),
]
DENSE = dataclasses.replace(tiny_gpt.SPARSE, dense_layers=(1, 2))
RANKS = 4 if torch.cuda.device_count() >= 4 else 2


def te_spec() -> Any:
    from megatron_mtraining import megatron as mtraining

    return mtraining.get_mtraining_layer_with_transformer_engine_spec()


def run(layout: str, cp_size: int, dtype: torch.dtype, dense: bool) -> tuple[float, dict[str, Tensor]]:
    config = dataclasses.replace(DENSE if dense else tiny_gpt.SPARSE, layout=layout)
    with tiny_gpt.parallel_job(config, cp_size=cp_size, inner_size=cp_size // 2 or 1):
        model = tiny_gpt.build(te_spec(), config=tiny_gpt.transformer_config(params_dtype=dtype)).to(dtype)
        return tiny_gpt.loss_and_gradients(model, tiny_gpt.batch(), config)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def runs_of_one_rank() -> list[tuple[float, dict[str, Tensor]]]:
    """Dense in float32, dense in bfloat16, sparse in bfloat16."""
    cases = [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
    return [run("striped", 1, dtype, dense) for dtype, dense in cases]


@pytest.fixture(scope="module")
def one_rank() -> list[tuple[float, dict[str, Tensor]]]:
    (runs,) = run_on_ranks(runs_of_one_rank, 1)
    return runs


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_several_ranks_train_as_one(layout: str, one_rank: list[tuple[float, dict[str, Tensor]]]):
    """Dense, so that rounding cannot choose other keys; float32 errors against what bfloat16 rounds off."""
    (expected_loss, expected), (_, coarse), _ = one_rank
    for loss, gradients in run_on_ranks(run, RANKS, layout=layout, cp_size=RANKS, dtype=torch.float32, dense=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for name, gradient in expected.items():
            rounding = relative_error(coarse[name], gradient)
            assert relative_error(gradients[name], gradient) < rounding / 4, name


def test_sparse_training_in_bfloat16(one_rank: list[tuple[float, dict[str, Tensor]]]):
    expected, _ = one_rank[2]
    for loss, gradients in run_on_ranks(run, RANKS, layout="striped", cp_size=RANKS, dtype=torch.bfloat16, dense=False):
        assert loss == pytest.approx(expected, rel=1e-2)
        assert all(gradient.isfinite().all() for gradient in gradients.values())


def checkpoints() -> None:
    """Strict loading both ways between TransformerEngine's attention and this one, fp8 state included."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    with tiny_gpt.parallel_job():
        stock, sparse = tiny_gpt.build(get_gpt_layer_with_transformer_engine_spec()), tiny_gpt.build(te_spec())
        assert list(stock.state_dict()) == list(sparse.state_dict())
        assert any(name.endswith("core_attention._extra_state") for name in sparse.state_dict())
        sparse.load_state_dict(stock.state_dict(), strict=True)
        stock.load_state_dict(sparse.state_dict(), strict=True)
        groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        assert set(stock.sharded_state_dict(metadata=groups)) == set(sparse.sharded_state_dict(metadata=groups))


def test_nothing_is_added_to_a_checkpoint():
    run_on_ranks(checkpoints, 1)
