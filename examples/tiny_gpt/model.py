"""Megatron-Core, set up: process groups, GPTModel with sparse attention, DDP, optimizer, learning-rate schedule."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_mtraining import MTrainingConfig
from megatron_mtraining import megatron as mtraining
from megatron_mtraining.backends.resolve import resolve_backend
from megatron_mtraining.errors import BackendUnavailableError
from megatron_mtraining.testing import megatron_on_cpu

from .data import VOCAB_SIZE

GROUP_TIMEOUT = timedelta(minutes=5)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Trainee:
    """What a training step needs."""

    model: Any
    """Megatron's DDP around a GPTModel."""

    optimizer: Any
    scheduler: Any
    device: torch.device


def start_process_group(choice: str) -> torch.device:
    """Joins the job that torchrun started: NCCL where each rank of the node has a GPU of its own, gloo elsewhere."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if choice == "cuda" and not enough:
        raise SystemExit(f"--device must be cpu or auto with {torch.cuda.device_count()} GPUs, got cuda.")
    if choice == "cpu" and torch.cuda.is_available():
        raise SystemExit("--device must be auto or cuda where there is a GPU, got cpu. Hide it: CUDA_VISIBLE_DEVICES= ")
    if not enough and torch.cuda.is_available():
        count = torch.cuda.device_count()
        raise SystemExit(f"GPUs must be as many as ranks or none, got {count}. Start fewer ranks, or hide the GPUs.")
    if enough and choice != "cpu":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=GROUP_TIMEOUT, device_id=torch.device("cuda", local_rank))
        return torch.device("cuda", local_rank)
    megatron_on_cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    return torch.device("cpu")


def check_backend(options: argparse.Namespace, config: MTrainingConfig, device: torch.device) -> None:
    """Refuses a backend that cannot run on ``device``, before a model is built."""
    case = {"dtype": DTYPES[options.dtype], "head_dim": options.head_dim, "block_size": config.block_size}
    try:
        resolve_backend(config.backend, device=device, **case)
    except BackendUnavailableError as error:
        raise SystemExit(f"--mtraining-backend must be one that runs here, got {config.backend}. {error}") from error


def start_megatron(config: MTrainingConfig, *, inner_size: int, seed: int) -> int:
    """All ranks become one context-parallel group of inner and outer rings; returns the size of an inner one."""
    cp_size = dist.get_world_size()
    sizes = [inner_size, cp_size // inner_size] if cp_size > 1 else None
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size, hierarchical_context_parallel_sizes=sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return mtraining.initialize(config, inner_size=inner_size).inner_size


def build_trainee(options: argparse.Namespace, device: torch.device) -> Trainee:
    """The model with the same weights whatever the number of ranks, ready to train.

    In bfloat16 as Megatron trains in it: parameters and activations in bfloat16, gradients summed and weights updated
    in float32.
    """
    config = _transformer_config(options)
    # The weights are drawn on the CPU from torch's own generator, so that neither device nor ranks change them.
    torch.manual_seed(options.seed)
    module = GPTModel(
        config,
        mtraining.get_mtraining_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=options.seq_len,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    ).to(device)
    if config.bf16:
        module = Float16Module(config, module)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=config.bf16), module)
    optimizer = get_megatron_optimizer(_optimizer_config(options), [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Trainee(model, optimizer, _scheduler(options, optimizer), device)


def _transformer_config(options: argparse.Namespace) -> TransformerConfig:
    """A small Llama: RMSNorm, SwiGLU, grouped key/value heads. Fusions need a GPU or apex and are left out."""
    dtype = DTYPES[options.dtype]
    return TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.ffn_hidden_size,
        num_attention_heads=options.num_heads,
        num_query_groups=options.num_kv_heads,
        kv_channels=options.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.05,
        context_parallel_size=dist.get_world_size(),
        variable_seq_lengths=True,  # short sequences in the dense warm-up
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it beside lengths that vary, without experts too
        # Losses are summed over tokens and divided once, so that no split of the tokens changes a gradient.
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


def _optimizer_config(options: argparse.Namespace) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        bf16=options.dtype == "bfloat16",
        params_dtype=DTYPES[options.dtype],
        lr=options.learning_rate,
        min_lr=options.learning_rate / 10,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
    )


def _scheduler(options: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Linear warm-up of the learning rate over a twentieth of the steps, then a cosine to a tenth."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.learning_rate,
        min_lr=options.learning_rate / 10,
        lr_warmup_steps=max(1, options.steps // 20),
        lr_decay_steps=max(2, options.steps),
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=options.steps,
        wd_incr_style="constant",
    )
