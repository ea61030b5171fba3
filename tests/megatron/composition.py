"""One small GPT model, the same whatever it is spread over, and training steps of it by Megatron's own machinery."""

from __future__ import annotations

import copy
import dataclasses
import functools
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mtraining.config import MTrainingConfig

from . import tiny_gpt

STEPS = 2
NUM_LAYERS = 4
BOUNDS = (0, 50, 50, 51, 140, 192)
"""Documents of a pack: none a multiple of the block, one empty, one of a single token."""

PADDING = (17, 60, 192, 33)
"""Tokens of padding at the end of each sequence of a step; one is padding alone."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What changes the losses."""

    num_experts: int | None = None
    packed: bool = False
    padded: bool = False
    """True if each sequence ends in padding, another number of tokens in each."""

    dense_layers: tuple[int, ...] = ()
    dense_warmup_steps: int = 0
    dense_below: int = 0
    index_sharing: str = "head"
    num_kv_heads: int = 1
    """By default fewer than the tensor-parallel ranks."""

    num_rows: int = 4
    """Sequences in a step: micro batches of one that data-parallel ranks share, more than a pipeline has stages."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """How a model is spread over ranks, and how it is trained."""

    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    recompute: str | None = None
    transformer_engine: bool = False
    layout: str = "striped"
    schedule: str = "hierarchical"
    model: Model = Model()

    nudged: bool = False
    """True to move every weight by one unit of its rounding: by as much runs differ that are the same."""

    @property
    def mtraining(self) -> MTrainingConfig:
        """The configuration of the attention."""
        return dataclasses.replace(
            tiny_gpt.SPARSE,
            layout=self.layout,
            schedule=self.schedule,
            dense_layers=self.model.dense_layers,
            dense_warmup_steps=self.model.dense_warmup_steps,
            dense_below=self.model.dense_below,
            index_sharing=self.model.index_sharing,
        )


class Norm(torch.nn.RMSNorm):
    """The norm of the local spec without its refusal of sequence parallelism, for which the weight is marked."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def train(combination: Combination) -> list[tuple[float | None, float]]:
    """The mean loss per token, None off the last pipeline stage, and the gradient norm of STEPS steps on this rank."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron_mtraining import megatron as mtraining

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=combination.tp,
        pipeline_model_parallel_size=combination.pp,
        virtual_pipeline_model_parallel_size=combination.vpp,
        context_parallel_size=combination.cp,
        expert_model_parallel_size=combination.ep,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    try:
        mtraining.initialize(combination.mtraining, inner_size=2 if combination.cp == 4 else None)
        chunks, optimizer = _trainer(combination)
        if combination.nudged:
            _nudge(chunks)
        return [_step(combination, chunks, optimizer, step) for step in range(STEPS)]
    finally:
        tiny_gpt.end_job()


def _nudge(chunks: list[Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    for chunk in chunks:
        for parameter in chunk.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1).to(parameter.device)
            parameter.data.add_(parameter.data * signs * torch.finfo(parameter.dtype).eps)


def _transformer_config(combination: Combination) -> Any:
    from megatron.core.distributed import finalize_model_grads

    recompute = {
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    }
    # Without a balancing loss: core 0.16 weights its gradient by the context-parallel size, under its own split too.
    experts = {
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }
    return tiny_gpt.transformer_config(
        num_layers=NUM_LAYERS,
        num_query_groups=combination.model.num_kv_heads,
        gated_linear_unit=False,  # whose two halves every tensor-parallel size would cut in another way
        activation_func=F.gelu,
        pipeline_model_parallel_size=combination.pp,
        virtual_pipeline_model_parallel_size=combination.vpp,
        expert_model_parallel_size=combination.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=combination.sequence_parallel,
        finalize_model_grads_func=finalize_model_grads,
        overlap_p2p_comm=combination.vpp is not None,  # batched, two stages would mix up what goes either way
        batch_p2p_comm=combination.vpp is None,
        **({"num_moe_experts": combination.model.num_experts} | experts if combination.model.num_experts else {}),
        **recompute.get(combination.recompute, {}),
    )


def _trainer(combination: Combination) -> tuple[list[Any], Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # core 0.16 asks for it without TransformerEngine too
    config = _transformer_config(combination)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=combination.distributed_optimizer,
        overlap_grad_reduce=combination.overlap,
        overlap_param_gather=combination.overlap,
    )
    chunks = []
    for stage in range(combination.vpp or 1):
        stages = {"ignore_virtual": False, "vp_stage": stage if combination.vpp else None}
        bare = tiny_gpt.build(
            _spec(combination, config, stages["vp_stage"]),
            config=config,
            parallel_output=True,
            pre_process=parallel_state.is_pipeline_first_stage(**stages),
            post_process=parallel_state.is_pipeline_last_stage(**stages),
            vp_stage=stages["vp_stage"],
        )
        _set_weights(bare, combination)
        chunks.append(DistributedDataParallel(config=config, ddp_config=ddp, module=bare))
    if combination.overlap:
        config.no_sync_func = chunks[0].no_sync
    options = OptimizerConfig(
        optimizer="adam",
        lr=5e-3,
        params_dtype=torch.float32,
        use_distributed_optimizer=combination.distributed_optimizer,
        overlap_param_gather=combination.overlap,
    )
    return chunks, get_megatron_optimizer(options, chunks)


def _spec(combination: Combination, config: Any, vp_stage: int | None) -> Any:
    """The layers of one model chunk."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from megatron_mtraining import megatron as mtraining

    experts = {"num_experts": combination.model.num_experts, "moe_grouped_gemm": False}
    if combination.transformer_engine:
        return mtraining.get_mtraining_layer_with_transformer_engine_spec(**experts)
    layer = copy.copy(mtraining.get_mtraining_layer_local_spec(normalization="RMSNorm", **experts))
    layer.submodules = copy.copy(layer.submodules)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


@torch.no_grad()
def _set_weights(model: Any, combination: Combination) -> None:
    """Gives each weight values that its place in the whole model decides, whichever rank holds what part of it."""
    from megatron.core import parallel_state

    ep_rank, tp_rank = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            place = parts.index("layers") + 1
            parts[place] = str(numbers[int(parts[place])])
        if "local_experts" in parts:
            place = parts.index("local_experts") + 1
            parts[place] = str(int(parts[place]) + ep_rank * combination.model.num_experts // combination.ep)
        split = getattr(parameter, "tensor_model_parallel", False) and "local_experts" not in parts
        shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", 0)
        if split:
            shape[dim] *= combination.tp
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        whole = torch.randn(shape, generator=generator) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0)
        parameter.copy_(whole.chunk(combination.tp, dim)[tp_rank] if split else whole)


def _step(combination: Combination, chunks: list[Any], optimizer: Any, step: int) -> tuple[float | None, float]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from megatron_mtraining import megatron as mtraining

    mtraining.set_training_step(step)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    first, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = range(first, combination.model.num_rows, ranks)
    reports = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward, combination),
        data_iterator=[iter(rows) for _ in chunks] if combination.vpp else iter(rows),
        model=chunks if combination.vpp else chunks[0],
        num_microbatches=len(rows),
        seq_length=tiny_gpt.SEQ_LEN,
        micro_batch_size=1,
        forward_only=False,
    )
    succeeded, gradient_norm, _ = optimizer.step()
    assert succeeded
    if not reports:
        return None, float(gradient_norm)
    totals = sum(report["lm loss"] for report in reports)
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(totals[0] / totals[1]), float(gradient_norm)


def _forward(combination: Combination, rows: Any, model: Any) -> tuple[Tensor, Any]:
    """A micro batch, cut by Megatron's own function as its training scripts do."""
    from megatron_mtraining import megatron as mtraining

    row = next(rows)
    batch, params = tiny_gpt.batch(seed=row), None
    if combination.model.padded:
        end = tiny_gpt.SEQ_LEN - PADDING[row]
        batch["tokens"][:, end:], batch["loss_mask"][:, max(end - 1, 0) :] = 0, 0
    if combination.model.packed:
        bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=tiny_gpt.device())
        params = mtraining.packed_seq_params(bounds)
        batch["position_ids"] = mtraining.document_position_ids(bounds.cpu())
    part = tiny_gpt.local_part(batch, combination.mtraining)
    losses = model(part["tokens"], part["position_ids"], None, labels=part["labels"], packed_seq_params=params)
    return losses, functools.partial(_token_loss, part["loss_mask"])


def _token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses.flatten() * loss_mask.flatten()).sum(), loss_mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}


def train_all(combinations: list[Combination]) -> list[list[tuple[float | None, float]]]:
    """:func:`train` of several combinations, one after the other in the same processes."""
    return [train(combination) for combination in combinations]
