"""Plans as a table, the best one in parts with the command that runs it, and all of it as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from .attention_clock import Load
from .memory import GIB
from .model import ModelShape
from .plan import FULL, MTRAINING, SELECTIVE, Plan
from .search import Candidate, Request, length_note

_HEAD = (
    f"{'tp':>3} {'cp':>4} {'pp':>3} {'dp':>4}  {'layout':<14}{'schedule':<14}{'recompute':<11}{'optimizer':<10}"
    f"{'GiB':>7}{'s/step':>9}{'tokens/s/GPU':>14}"
)


def report_lines(request: Request, candidates: Sequence[Candidate], *, rows: int) -> Iterator[str]:
    """Yield the lines that the command prints."""
    model, load, best = request.model, request.load, candidates[0]
    parameters = model.stage_parameters()
    yield (
        f"{model.name}: {parameters / 1e9:.2f} billion parameters; {load.seq_len} tokens, {100 * load.kept:.2f} % kept "
        f"({load.source})"
    )
    yield (
        f"{request.gpus} GPUs of {request.memory_gib:g} GiB in nodes of {request.node_size}, "
        f"{100 * request.margin:g} % left free; {request.global_batch} sequences a step"
    )
    yield f"profile: {request.profile.source}"
    yield from (f"note: {note}" for note in (*request.notes, length_note(request)) if note)
    yield ""
    yield _HEAD
    yield from (_row(each) for each in candidates[:rows])
    yield ""
    yield from _memory_lines(best, request)
    yield ""
    yield from _time_lines(best)
    yield ""
    yield from command_lines(best.plan, [*plan_flags(best.plan, load), *model_flags(model)])


def write_plans(path: Path, request: Request, candidates: Sequence[Candidate]) -> None:
    """Write everything that was found, as JSON: bytes and seconds."""
    entries = {
        "model": asdict(request.model),
        "kept_density": request.load.kept,
        "index": request.load.source,
        "gpus": request.gpus,
        "memory_gib": request.memory_gib,
        "margin": request.margin,
        "profile": asdict(request.profile),
        "flags": [word for flag in plan_flags(candidates[0].plan, request.load) for word in flag],
        "model_flags": [word for flag in model_flags(request.model) for word in flag],
        "plans": [
            {
                **asdict(each.plan),
                "memory_bytes": {**asdict(each.memory), "allocated": each.memory.allocated, "total": each.memory.total},
                "seconds": {**each.time.parts(), "total": each.time.total},
            }
            for each in candidates
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1) + "\n")


def _row(candidate: Candidate) -> str:
    plan, seconds = candidate.plan, candidate.time.total
    rate = plan.global_batch * plan.seq_len / seconds / plan.gpus
    return (
        f"{plan.tp:>3} {plan.cp:>4} {plan.pp:>3} {plan.dp:>4}  {plan.layout:<14}{plan.schedule:<14}"
        f"{plan.recompute:<11}{'host' if plan.offload else 'GPU':<10}{candidate.memory.total / GIB:>7.1f}"
        f"{seconds:>9.2f}{rate:>14.0f}"
    )


def _memory_lines(candidate: Candidate, request: Request) -> Iterator[str]:
    memory = candidate.memory
    free = request.memory_gib - memory.total / GIB
    yield f"Memory of the fullest GPU: {memory.total / GIB:.1f} GiB, {free:.1f} GiB free"
    parts = {
        "weights, bfloat16": memory.weights,
        "gradients, float32": memory.gradients,
        "optimizer states": memory.optimizer,
        "activations kept for the backward": memory.kept,
        f"on top of them: {memory.moment}": memory.working,
        "rotary tables and the batch": memory.tables,
        "CUDA context and NCCL (assumed)": memory.framework,
    }
    yield from (f"  {name:<58}{size / GIB:>8.2f} GiB" for name, size in parts.items())
    if memory.host_optimizer:
        yield f"  {'beside it, in the memory of the host':<58}{memory.host_optimizer / GIB:>8.2f} GiB"


def _time_lines(candidate: Candidate) -> Iterator[str]:
    time, plan = candidate.time, candidate.plan
    yield f"Time of a step: {time.total:.2f} s, {plan.micro_batches} microbatches"
    for name, seconds in time.parts().items():
        if seconds:
            yield f"  {name.replace('_', ' '):<58}{seconds:>8.2f} s {100 * seconds / time.total:>5.1f} %"


def plan_flags(plan: Plan, load: Load) -> list[tuple[str, ...]]:
    """Return flags of Megatron and of this package that make a run what ``plan`` says, each with its values."""
    is_selective = plan.recompute == SELECTIVE
    return [
        ("--tensor-model-parallel-size", str(plan.tp)),
        *_switches((plan.tp > 1, "--sequence-parallel")),
        ("--context-parallel-size", str(plan.cp)),
        ("--pipeline-model-parallel-size", str(plan.pp)),
        *_attention(plan, load),
        ("--transformer-impl", "transformer_engine"),
        ("--seq-length", str(plan.seq_len)),
        ("--max-position-embeddings", str(plan.seq_len)),
        ("--micro-batch-size", "1"),
        ("--global-batch-size", str(plan.global_batch)),
        ("--bf16",),
        *_switches(
            (plan.distributed_optimizer, "--use-distributed-optimizer"),
            (plan.overlap, "--overlap-grad-reduce"),
            (plan.overlap, "--overlap-param-gather"),
            (plan.loss_fusion, "--cross-entropy-loss-fusion"),
            (plan.recompute == FULL, "--recompute-granularity full"),
            (plan.recompute == FULL, "--recompute-method uniform"),
            (plan.recompute == FULL, "--recompute-num-layers 1"),
            (is_selective, "--recompute-granularity selective"),
            (is_selective, "--recompute-modules mlp"),
            (plan.offload, "--optimizer-cpu-offload"),
            (plan.offload, "--use-precision-aware-optimizer"),
            (plan.offload, "--overlap-cpu-optimizer-d2h-h2d"),
        ),
    ]


def model_flags(model: ModelShape) -> list[tuple[str, ...]]:
    """Return flags of Megatron for the shape of ``model``; positions are the user's."""
    is_grouped = model.num_kv_heads < model.num_heads
    return [
        ("--num-layers", str(model.num_layers)),
        ("--hidden-size", str(model.hidden_size)),
        ("--ffn-hidden-size", str(model.ffn_hidden_size)),
        ("--num-attention-heads", str(model.num_heads)),
        ("--kv-channels", str(model.head_dim)),
        *_switches(
            (not model.tied_embeddings, "--untie-embeddings-and-output-weights"),
            (model.gated_mlp, "--swiglu"),
            (model.qkv_bias and not model.linear_bias, "--add-qkv-bias"),
            (not model.linear_bias, "--disable-bias-linear"),
            (model.qk_norm, "--qk-layernorm"),
            (not model.layer_norm, "--normalization RMSNorm"),
            (is_grouped, "--group-query-attention"),
            (is_grouped, f"--num-query-groups {model.num_kv_heads}"),
        ),
        ("--attention-dropout", "0"),
        ("--hidden-dropout", "0"),
    ]


def _attention(plan: Plan, load: Load) -> list[tuple[str, ...]]:
    if plan.attention != MTRAINING:
        return [("--attention-backend", "auto"), ("--cp-comm-type", "p2p")]
    inner, outer = plan.hierarchical_sizes
    return [
        ("--attention-backend", "mtraining"),
        ("--mtraining-layout", plan.layout),
        ("--mtraining-schedule", plan.schedule),
        *_switches((plan.index_sharing != "head", f"--mtraining-index-sharing {plan.index_sharing}")),
        *load.flags,
        ("--no-create-attention-mask-in-dataloader",),
        *_switches((plan.cp > 1 and plan.schedule != "flat", f"--hierarchical-context-parallel-sizes {inner} {outer}")),
    ]


def _switches(*flags: tuple[bool, str]) -> list[tuple[str, ...]]:
    """Return the switches that are on, in words."""
    return [tuple(words.split()) for is_on, words in flags if is_on]


def command_lines(plan: Plan, flags: list[tuple[str, ...]], *, width: int = 110) -> list[str]:
    """Return a shell command to start on every node, its flags filled into lines."""
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
