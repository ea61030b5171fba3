"""The command line that runs a plan."""

from __future__ import annotations

from .attention_clock import Load
from .model_shape import ModelShape
from .plan import FULL, MTRAINING, SELECTIVE, Plan


def plan_flags(plan: Plan, load: Load) -> list[tuple[str, ...]]:
    """Flags of Megatron and of this package that make a run what ``plan`` says, each with its values."""
    flags: list[tuple[str, ...]] = [
        ("--tensor-model-parallel-size", str(plan.tp)),
        *([("--sequence-parallel",)] if plan.tp > 1 else []),
        ("--context-parallel-size", str(plan.cp)),
        ("--pipeline-model-parallel-size", str(plan.pp)),
        *_attention(plan, load),
        ("--transformer-impl", "transformer_engine"),
        ("--seq-length", str(plan.seq_len)),
        ("--max-position-embeddings", str(plan.seq_len)),
        ("--micro-batch-size", "1"),
        ("--global-batch-size", str(plan.global_batch)),
        ("--bf16",),
    ]
    if plan.distributed_optimizer:
        flags.append(("--use-distributed-optimizer",))
    if plan.overlap:
        flags += [("--overlap-grad-reduce",), ("--overlap-param-gather",)]
    if plan.loss_fusion:
        flags.append(("--cross-entropy-loss-fusion",))
    if plan.recompute == FULL:
        flags += [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", "1"),
        ]
    elif plan.recompute == SELECTIVE:
        flags += [("--recompute-granularity", "selective"), ("--recompute-modules", "mlp")]
    if plan.offload:
        flags += [
            ("--optimizer-cpu-offload",),
            ("--use-precision-aware-optimizer",),
            ("--overlap-cpu-optimizer-d2h-h2d",),
        ]
    return flags


def model_flags(model: ModelShape) -> list[tuple[str, ...]]:
    """Flags of Megatron for the shape of ``model``; positions are the user's."""
    switches = (
        (not model.tied_embeddings, ("--untie-embeddings-and-output-weights",)),
        (model.gated_mlp, ("--swiglu",)),
        (model.qkv_bias and not model.linear_bias, ("--add-qkv-bias",)),
        (not model.linear_bias, ("--disable-bias-linear",)),
        (model.qk_norm, ("--qk-layernorm",)),
        (not model.layer_norm, ("--normalization", "RMSNorm")),
        (model.num_kv_heads < model.num_heads, ("--group-query-attention",)),
        (model.num_kv_heads < model.num_heads, ("--num-query-groups", str(model.num_kv_heads))),
    )
    return [
        ("--num-layers", str(model.num_layers)),
        ("--hidden-size", str(model.hidden_size)),
        ("--ffn-hidden-size", str(model.ffn_hidden_size)),
        ("--num-attention-heads", str(model.num_heads)),
        ("--kv-channels", str(model.head_dim)),
        *(flag for is_on, flag in switches if is_on),
        ("--attention-dropout", "0"),
        ("--hidden-dropout", "0"),
    ]


def _attention(plan: Plan, load: Load) -> list[tuple[str, ...]]:
    if plan.attention != MTRAINING:
        return [("--attention-backend", "auto"), ("--cp-comm-type", "p2p")]
    flags: list[tuple[str, ...]] = [
        ("--attention-backend", "mtraining"),
        ("--mtraining-layout", plan.layout),
        ("--mtraining-schedule", plan.schedule),
        *([("--mtraining-index-sharing", plan.index_sharing)] if plan.index_sharing != "head" else []),
        *load.flags,
        ("--no-create-attention-mask-in-dataloader",),
    ]
    if plan.cp > 1 and plan.schedule != "flat":
        flags.append(("--hierarchical-context-parallel-sizes", *map(str, plan.hierarchical_sizes)))
    return flags


def command_lines(plan: Plan, flags: list[tuple[str, ...]], *, width: int = 110) -> list[str]:
    """A shell command to start on every node, its flags filled into lines."""
    nodes, per_node = max(plan.gpus // plan.node_size, 1), min(plan.gpus, plan.node_size)
    start = f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes {nodes} --nproc-per-node {per_node}"
    lines = [f"{start} -m megatron_mtraining pretrain_gpt.py"]
    line = "   "
    for flag in flags:
        words = " ".join(flag)
        if len(line) + len(words) + 1 > width:
            lines.append(line)
            line = "   "
        line += f" {words}"
    return [f"{each} \\" for each in lines] + [line]
