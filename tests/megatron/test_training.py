"""Megatron's own DDP, optimizers and schedule over this attention: the same run however it is spread."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from . import tiny_gpt
from .ranks import run_on_ranks

STEPS = 3
NUM_ROWS = 2
"""Sequences in each step, shared among the data-parallel ranks."""


def train(cp_size: int, distributed_optimizer: bool = False, recompute: str | None = None) -> list[tuple[float, float]]:
    """On each rank: the loss and the gradient norm of STEPS steps."""
    with tiny_gpt.parallel_job(cp_size=cp_size, inner_size=1 if cp_size < 4 else 2):
        model, optimizer = trainer(distributed_optimizer, **recompute_options(recompute))
        return [train_step(model, optimizer, micro_batches()) for _ in range(STEPS)]


def recompute_options(recompute: str | None) -> dict[str, Any]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def trainer(distributed_optimizer: bool = False, **options: Any) -> tuple[Any, Any]:
    """A model in Megatron's DDP and its optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = tiny_gpt.transformer_config(finalize_model_grads_func=finalize_model_grads, **options)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    bare = tiny_gpt.build(tiny_gpt.sparse_spec(), config=config, parallel_output=True)
    model = DistributedDataParallel(config=config, ddp_config=ddp_config, module=bare)
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=5e-3, params_dtype=torch.float32, use_distributed_optimizer=distributed_optimizer
    )
    return model, get_megatron_optimizer(optimizer_config, [model])


def micro_batches(loss_mask: Tensor | None = None) -> list[dict[str, Tensor]]:
    """This data-parallel rank's share of the NUM_ROWS sequences, the same ones in every step."""
    from megatron.core import parallel_state

    dp_size, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    rows = [tiny_gpt.batch(seed=row) for row in range(NUM_ROWS)]
    if loss_mask is not None:
        rows = [row | {"loss_mask": loss_mask} for row in rows]
    return rows[dp_rank::dp_size]


def accumulate_gradients(model: Any, batches: list[dict[str, Tensor]]) -> float:
    """Forward and backward by Megatron's schedule; the mean loss per unmasked token of all ranks' batches."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
        part = tiny_gpt.local_part(next(iterator))
        losses = model(part["tokens"], part["position_ids"], None, labels=part["labels"])
        return losses, functools.partial(token_loss, part["loss_mask"])

    model.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=tiny_gpt.SEQ_LEN // parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=False,
    )
    totals = sum(report["lm loss"] for report in reports)
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(totals[0] / totals[1])


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum and the number of tokens, which Megatron divides after adding up all ranks (calculate_per_token_loss)."""
    total, count = (losses.flatten() * loss_mask.flatten()).sum(), loss_mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}


def train_step(model: Any, optimizer: Any, batches: list[dict[str, Tensor]]) -> tuple[float, float]:
    optimizer.zero_grad()
    loss = accumulate_gradients(model, batches)
    succeeded, gradient_norm, _ = optimizer.step()
    assert succeeded
    return loss, float(gradient_norm)


@functools.cache
def on_one_rank() -> list[tuple[float, float]]:
    return run_on_ranks(train, 1, cp_size=1)[0]


@pytest.mark.parametrize(
    ("world_size", "cp_size", "distributed_optimizer"),
    [(1, 1, True), (4, 4, False), (4, 4, True), (4, 2, False), (4, 2, True)],
    ids=["1-distopt", "cp4", "cp4-distopt", "dp2-cp2", "dp2-cp2-distopt"],
)
def test_training_runs_alike(world_size: int, cp_size: int, distributed_optimizer: bool):
    expected = torch.tensor(on_one_rank())
    assert expected[-1, 0] < expected[0, 0] - 0.1, "the loss does not fall, so equal losses would mean little"
    runs = run_on_ranks(train, world_size, cp_size=cp_size, distributed_optimizer=distributed_optimizer)
    for run in runs:
        # Float32 sums in another order: some 1e-7 a step, which Adam passes on by the sign of tiny gradients.
        torch.testing.assert_close(torch.tensor(run), expected, atol=5e-6, rtol=5e-6)


def gradients_of_one_token(cp_size: int) -> dict[str, Tensor]:
    """What Megatron's DDP leaves in main_grad when a single token counts (and the mask of most ranks is empty)."""
    loss_mask = torch.zeros(1, tiny_gpt.SEQ_LEN)
    loss_mask[0, 100] = 1.0
    with tiny_gpt.parallel_job(cp_size=cp_size, inner_size=1):
        model, _ = trainer()
        accumulate_gradients(model, micro_batches(loss_mask))
        return {name: parameter.main_grad.cpu().clone() for name, parameter in model.named_parameters()}


def test_one_valid_token_has_its_whole_gradient():
    (expected,) = run_on_ranks(gradients_of_one_token, 1, cp_size=1)
    for gradients in run_on_ranks(gradients_of_one_token, 4, cp_size=4):
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def recomputed(recompute: str | None) -> dict[str, Any]:
    """Loss, gradients, and each layer's index after the forward pass and after the backward pass."""
    from megatron_mtraining import megatron as mtraining

    with tiny_gpt.parallel_job(cp_size=2, inner_size=1):
        config = tiny_gpt.transformer_config(**recompute_options(recompute))
        model = tiny_gpt.build(tiny_gpt.sparse_spec(), config=config, parallel_output=True)
        part = tiny_gpt.local_part(tiny_gpt.batch())
        with mtraining.record_attention() as recorder:
            loss = model(part["tokens"], part["position_ids"], None, labels=part["labels"]).sum()
            forward = dict(recorder.layers)
            loss.backward()
        gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
        indices = [{layer: as_tuple(record) for layer, record in seen.items()} for seen in (forward, recorder.layers)]
        again = [layer for layer, record in recorder.layers.items() if record is not forward[layer]]
        return {"loss": loss.item(), "gradients": gradients, "indices": indices, "selected again": again}


def as_tuple(record: Any) -> tuple[Tensor, ...]:
    index = record.index.to("cpu")
    return index.vertical, index.num_vertical, index.slash, index.num_slash


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_finds_the_same_index_and_gradients(recompute: str):
    plain = run_on_ranks(recomputed, 2, recompute=None)
    for run, expected in zip(run_on_ranks(recomputed, 2, recompute=recompute), plain, strict=True):
        assert expected["selected again"] == []
        assert run["selected again"] == [1, 2]
        assert run["loss"] == expected["loss"]
        for name, gradient in expected["gradients"].items():
            assert torch.equal(run["gradients"][name], gradient), name
        for indices in run["indices"]:
            for layer, index in expected["indices"][0].items():
                assert all(torch.equal(one, other) for one, other in zip(indices[layer], index, strict=True))
