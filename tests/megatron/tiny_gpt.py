"""A GPTModel small enough for a unit test, the same on every rank, and one way to run it under any parallel layout."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import SequenceLayout

SEQ_LEN = 192
"""A multiple of 24, 48 and 64: of what every layout asks on 1, 2, 3 and 4 ranks with blocks of 8."""

VOCAB = 64

SPARSE = MTrainingConfig.algorithm_1(
    layout="striped",
    schedule="hierarchical",
    block_size=8,
    num_probe_rows=16,
    num_probe_windows=4,
    sink_tokens=4,
    local_blocks=1,
    max_vertical=12,
    max_slash=4,
    vertical_top_p=0.5,
    slash_top_p=0.5,
    dense_below=0,
)
"""Keeps about a third of the pairs of a SEQ_LEN sequence."""


def device() -> torch.device:
    """Where this rank computes."""
    import torch.distributed as dist

    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def transformer_config(**options: Any) -> Any:
    """A TransformerConfig whose fusions, which need a GPU, are off."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    defaults = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**(defaults | options))


def build(spec: Any, *, config: Any = None, **options: Any) -> Any:
    """A GPTModel of ``spec`` with the same weights on every rank and in every job."""
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(1234)
    model = GPTModel(
        config or transformer_config(),
        spec,
        vocab_size=VOCAB,
        **({"max_sequence_length": SEQ_LEN, "position_embedding_type": "rope", "parallel_output": False} | options),
    )
    return model.to(device())


def sparse_spec() -> Any:
    """The layer spec of most tests: Megatron's local one with this attention."""
    from megatron_mtraining import megatron as mtraining

    return mtraining.get_mtraining_layer_local_spec(normalization="RMSNorm")


@contextlib.contextmanager
def parallel_job(
    config: MTrainingConfig = SPARSE, *, cp_size: int = 1, tp_size: int = 1, inner_size: int | None = None
) -> Iterator[Any]:
    """Megatron's groups and this package's runtime for the length of a ``with`` block."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron_mtraining import megatron as mtraining

    parallel_state.initialize_model_parallel(context_parallel_size=cp_size, tensor_model_parallel_size=tp_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    try:
        yield mtraining.initialize(config, inner_size=inner_size)
    finally:
        end_job()


def end_job() -> None:
    """Ends this package's and Megatron's groups: Megatron only forgets them, and gloo keeps threads for each."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_mtraining import megatron as mtraining

    mtraining.destroy()
    parallel_state.destroy_model_parallel()
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def batch(*, seed: int = 0, batch_size: int = 1, seq_len: int = SEQ_LEN) -> dict[str, Tensor]:
    """A whole batch: repeating tokens with noise, so that attention has something to find."""
    generator = torch.Generator().manual_seed(seed)
    motif = torch.randint(0, VOCAB, (batch_size, 24), generator=generator).repeat(1, seq_len // 24 + 1)
    noise = torch.randint(0, VOCAB, motif.shape, generator=generator)
    text = torch.where(torch.rand(motif.shape, generator=generator) < 0.8, motif, noise)[:, : seq_len + 1]
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(batch_size, seq_len),
        "position_ids": torch.arange(seq_len).expand(batch_size, -1).contiguous(),
    }


def local_part(whole: dict[str, Tensor], config: MTrainingConfig = SPARSE) -> dict[str, Tensor]:
    """This rank's part of ``whole``, on its device."""
    from megatron.core import parallel_state

    from megatron_mtraining import megatron as mtraining

    layout = SequenceLayout(
        config.layout,
        seq_len=whole["tokens"].shape[1],
        cp_size=parallel_state.get_context_parallel_world_size(),
        block_size=config.block_size,
        node_size=mtraining.runtime.current_runtime().inner_size,
    )
    part = mtraining.shard_batch(whole, layout, parallel_state.get_context_parallel_rank())
    return {name: value.to(device()) for name, value in part.items()}


def mean_loss(model: Any, whole: dict[str, Tensor], config: MTrainingConfig = SPARSE, **inputs: Any) -> Tensor:
    """This rank's share of the mean loss per unmasked token over the whole sequence.

    The cross entropy is taken here, in the dtype of the model, because Megatron's computes in float32.
    """
    part = local_part(whole, config)
    logits = model(part["tokens"], part["position_ids"], None, **inputs)
    losses = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="none")
    return (losses * part["loss_mask"].flatten()).sum() / whole["loss_mask"].sum()


def loss_and_gradients(
    model: Any, whole: dict[str, Tensor], config: MTrainingConfig = SPARSE, **inputs: Any
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss per unmasked token over the whole sequence, and every parameter's gradient of it, on the CPU."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    cp_group = parallel_state.get_context_parallel_group()
    loss = mean_loss(model, whole, config, **inputs)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=cp_group)
    gradients = {}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=cp_group)
        gradients[name] = parameter.grad.cpu()
    return float(total), gradients
