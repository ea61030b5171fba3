"""Nothing is added to a checkpoint and nothing is missing from it, in either direction and at another CP size."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from . import tiny_gpt
from .ranks import run_on_ranks


def stock_and_sparse() -> tuple[Any, Any]:
    """Models of Megatron's local spec and of this one, from unlike weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    stock = tiny_gpt.build(get_gpt_layer_local_spec(normalization="RMSNorm"))
    sparse = tiny_gpt.build(tiny_gpt.sparse_spec())
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(0.5)
    return stock, sparse


def strict_loading() -> None:
    with tiny_gpt.parallel_job():
        stock, sparse = stock_and_sparse()
        assert list(stock.state_dict()) == list(sparse.state_dict())
        sparse.load_state_dict(stock.state_dict(), strict=True)
        assert all(torch.equal(value, stock.state_dict()[name]) for name, value in sparse.named_parameters())
        stock.load_state_dict(sparse.state_dict(), strict=True)


def fp8_state_of_a_te_checkpoint() -> None:
    with tiny_gpt.parallel_job():
        stock, sparse = stock_and_sparse()
        extra = {f"decoder.layers.{layer}.self_attention.core_attention._extra_state": None for layer in (0, 1)}
        saved = stock.state_dict() | extra
        sparse.load_state_dict(saved, strict=True)
        assert set(extra) <= set(saved), "the caller's checkpoint was changed"


def sharded_keys() -> None:
    from megatron.core import parallel_state

    with tiny_gpt.parallel_job():
        groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        stock, sparse = (model.sharded_state_dict(metadata=groups) for model in stock_and_sparse())
        assert set(stock) == set(sparse)
        assert not [name for name in sparse if "core_attention" in name]


def loss_after_loading(weights: dict[str, Any], cp_size: int) -> float:
    with tiny_gpt.parallel_job(cp_size=cp_size, inner_size=1):
        model = tiny_gpt.build(tiny_gpt.sparse_spec()).double()
        model.load_state_dict(weights, strict=True)
        return tiny_gpt.loss_and_gradients(model, tiny_gpt.batch())[0]


def save_shards(folder: str, which: str, cp_size: int) -> float:
    """Saves a model of Megatron's own attention or of this one as a distributed checkpoint; the loss of this one."""
    from megatron.core import dist_checkpointing

    with tiny_gpt.parallel_job(cp_size=cp_size, inner_size=1):
        stock_spec, sparse = local_spec(), tiny_gpt.build(tiny_gpt.sparse_spec())
        with torch.no_grad():
            for parameter in sparse.parameters():
                parameter.mul_(0.5)
        model = sparse
        if which == "stock":
            model = tiny_gpt.build(stock_spec)
            model.load_state_dict(sparse.state_dict(), strict=True)
        dist_checkpointing.save(shards(model), folder)
        return tiny_gpt.loss_and_gradients(sparse, tiny_gpt.batch())[0]


def load_shards(folder: str, which: str, cp_size: int, tp_size: int, layout: str) -> float:
    """The loss of this attention with weights that a model of Megatron's own or of this one has loaded, strictly."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    config = dataclasses.replace(tiny_gpt.SPARSE, layout=layout)
    with tiny_gpt.parallel_job(config, cp_size=cp_size, tp_size=tp_size, inner_size=1):
        sparse = tiny_gpt.build(tiny_gpt.sparse_spec())
        model = sparse if which == "sparse" else tiny_gpt.build(local_spec())
        model.load_state_dict(dist_checkpointing.load(shards(model), folder, strict=StrictHandling.RAISE_ALL))
        sparse.load_state_dict(model.state_dict(), strict=True)
        return tiny_gpt.loss_and_gradients(sparse, tiny_gpt.batch(), config)[0]


def local_spec() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization="RMSNorm")


def shards(model: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def trained_weights() -> dict[str, Any]:
    with tiny_gpt.parallel_job():
        stock, _ = stock_and_sparse()
        return {name: value.cpu() if torch.is_tensor(value) else value for name, value in stock.state_dict().items()}


def test_strict_loading_works_both_ways():
    run_on_ranks(strict_loading, 1)


def test_the_fp8_state_of_a_transformer_engine_checkpoint_is_no_unexpected_key():
    run_on_ranks(fp8_state_of_a_te_checkpoint, 1)


def test_sharded_checkpoints_have_the_same_keys():
    run_on_ranks(sharded_keys, 1)


def test_weights_resume_at_another_context_parallel_size():
    (weights,) = run_on_ranks(trained_weights, 1)
    (expected,) = run_on_ranks(loss_after_loading, 1, weights=weights, cp_size=1)
    assert all(abs(loss - expected) < 1e-10 for loss in run_on_ranks(loss_after_loading, 2, weights=weights, cp_size=2))


@pytest.mark.parametrize(
    ("saved_by", "saving_ranks", "loaded_by", "cp_size", "tp_size", "layout"),
    [
        ("stock", 1, "sparse", 2, 1, "rotated"),
        ("sparse", 2, "sparse", 2, 2, "zigzag"),
        ("sparse", 2, "stock", 1, 1, "striped"),
    ],
)
def test_distributed_checkpoints_resume_elsewhere(
    saved_by: str, saving_ranks: int, loaded_by: str, cp_size: int, tp_size: int, layout: str, tmp_path: Path
):
    folder = str(tmp_path)
    expected = run_on_ranks(save_shards, saving_ranks, folder=folder, which=saved_by, cp_size=saving_ranks)[0]
    places = {"cp_size": cp_size, "tp_size": tp_size, "layout": layout}
    for loss in run_on_ranks(load_shards, cp_size * tp_size, folder=folder, which=loaded_by, **places):
        assert loss == pytest.approx(expected, rel=1e-6)
