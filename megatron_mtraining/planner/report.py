"""Plans as a table, the best one in parts with the command that runs it, and all of it as a file."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ..console import text_table
from .attention_clock import Load
from .memory import GIB
from .model import ModelShape
from .plan import FULL, MTRAINING, SELECTIVE, Plan
from .search import Candidate, Request


def report_lines(request: Request, candidates: Sequence[Candidate], *, rows: int) -> Iterator[str]:
    """Yield the lines that the command prints."""
    model, load, best = request.model, request.load, candidates[0]
    yield f"{model.name}: {model.stage_parameters() / 1e9:.2f} billion parameters"
    yield f"{load.seq_len} tokens, density {100 * load.density:.2f} % ({load.source})"
    yield (
        f"{request.gpus} GPUs of {request.memory_gib:g} GiB in nodes of {request.node_size}, "
        f"{100 * request.margin:g} % left free; {request.global_batch} sequences a step"
    )
    yield f"profile: {request.profile.source}"
    yield from (f"note: {note}" for note in request.notes)
    sections = (_memory_lines(best, request), _time_lines(best), _command_lines(request, best.plan))
    for section in (_table(candidates[:rows]), *sections):
        yield from ("", *section)


def write_plans(path: Path, request: Request, candidates: Sequence[Candidate]) -> None:
    """Write everything that was found, as JSON: bytes and seconds."""
    plans = []
    for each in candidates:
        memory = {**asdict(each.memory), "allocated": each.memory.allocated, "total": each.memory.total}
        seconds = {**each.time.parts(), "total": each.time.total}
        plans.append({**asdict(each.plan), "memory_bytes": memory, "seconds": seconds})
    entries = {name: asdict(getattr(request, name)) for name in ("model", "profile")} | {
        "density": request.load.density,
        "index": request.load.source,
        "flags": plan_flags(candidates[0].plan, request.load),
        "model_flags": model_flags(request.model),
        "plans": plans,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1) + "\n")


def _table(candidates: Sequence[Candidate]) -> list[str]:
    headings = "tp cp pp dp layout schedule recompute optimizer GiB s/step tokens/s/GPU".split()
    rows = []
    for each in candidates:
        plan, seconds = each.plan, each.time.total
        rate = plan.global_batch * plan.seq_len / seconds / plan.gpus
        row = (plan.tp, plan.cp, plan.pp, plan.dp, plan.layout, plan.schedule, plan.recompute)
        sizes = (f"{each.memory.total / GIB:.1f}", f"{seconds:.2f}", f"{rate:.0f}")
        rows.append([*map(str, row), "host" if plan.offload else "GPU", *sizes])
    return text_table(headings, rows, indent=" ")


def _memory_lines(candidate: Candidate, request: Request) -> Iterator[str]:
    memory, total = candidate.memory, candidate.memory.total / GIB
    yield f"Memory of the fullest GPU: {total:.1f} GiB, {request.memory_gib - total:.1f} GiB free"
    parts = {
        "weights, bfloat16": memory.weights,
        "gradients, float32": memory.gradients,
        "optimizer states": memory.optimizer,
        "activations saved for the backward": memory.saved,
        f"on top of them: {memory.moment}": memory.working,
        "rotary tables and the batch": memory.tables,
        "CUDA context and NCCL (assumed)": memory.framework,
    }
    if memory.host_optimizer:
        parts["in the memory of the host: optimizer states"] = memory.host_optimizer
    yield from (f"  {name:<58}{size / GIB:>8.2f} GiB" for name, size in parts.items())


def _time_lines(candidate: Candidate) -> Iterator[str]:
    time, plan = candidate.time, candidate.plan
    yield f"Time of a step: {time.total:.2f} s, {plan.micro_batches} microbatches"
    for name, seconds in time.parts().items():
        if seconds:
            yield f"  {name.replace('_', ' '):<58}{seconds:>8.2f} s {100 * seconds / time.total:>5.1f} %"


def plan_flags(plan: Plan, load: Load) -> list[str]:
    """Return flags of Megatron and of this package, with their values, that make a run what ``plan`` says."""
    is_full, is_selective = plan.recompute == FULL, plan.recompute == SELECTIVE
    inner, outer = plan.hierarchical_sizes
    attention = "--attention-backend auto --cp-comm-type p2p"
    if plan.attention == MTRAINING:
        attention = (
            f"--attention-backend mtraining --mtraining-layout {plan.layout} --mtraining-schedule {plan.schedule}"
            + _if(plan.index_sharing != "head", f"--mtraining-index-sharing {plan.index_sharing}")
            + f" {load.flags} --no-create-attention-mask-in-dataloader"
            + _if(plan.cp > 1 and plan.schedule != "flat", f"--hierarchical-context-parallel-sizes {inner} {outer}")
        )
    return (
        f"--tensor-model-parallel-size {plan.tp}"
        + _if(plan.tp > 1, "--sequence-parallel")
        + f" --context-parallel-size {plan.cp} --pipeline-model-parallel-size {plan.pp} {attention}"
        f" --transformer-impl transformer_engine --seq-length {plan.seq_len} --max-position-embeddings {plan.seq_len}"
        f" --micro-batch-size 1 --global-batch-size {plan.global_batch} --bf16 --use-distributed-optimizer"
        + _if(plan.overlap, "--overlap-grad-reduce --overlap-param-gather")
        + _if(is_full, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        + _if(is_selective, "--recompute-granularity selective --recompute-modules mlp")
        + _if(plan.offload, "--optimizer-cpu-offload --use-precision-aware-optimizer --overlap-cpu-optimizer-d2h-h2d")
    ).split()


def model_flags(model: ModelShape) -> list[str]:
    """Return flags of Megatron for the shape of ``model``; positions are the user's."""
    return (
        f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} --ffn-hidden-size {model.ffn_hidden_size}"
        f" --num-attention-heads {model.num_heads} --kv-channels {model.head_dim}"
        + _if(not model.tied_embeddings, "--untie-embeddings-and-output-weights")
        + _if(model.gated_mlp, "--swiglu")
        + _if(model.qkv_bias, "--add-qkv-bias")
        + _if(not model.linear_bias, "--disable-bias-linear")
        + _if(not model.layer_norm, "--normalization RMSNorm")
        + _if(model.qk_norm, "--qk-layernorm")
        + _if(model.num_kv_heads < model.num_heads, f"--group-query-attention --num-query-groups {model.num_kv_heads}")
        + " --attention-dropout 0 --hidden-dropout 0"
    ).split()


def _if(is_on: bool, flags: str) -> str:
    return f" {flags}" if is_on else ""


def _command_lines(request: Request, plan: Plan) -> Iterator[str]:
    """Yield a shell command to start on every node, its flags filled into lines."""
    nodes, per_node = max(plan.gpus // plan.node_size, 1), min(plan.gpus, plan.node_size)
    yield f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes {nodes} --nproc-per-node {per_node} \\"
    # A flag and its values remain on one line.
    flags = re.sub(r" (?!--)", "\0", " ".join([*plan_flags(plan, request.load), *model_flags(request.model)]))
    lines = textwrap.wrap(flags, 106, break_on_hyphens=False)
    yield "    -m megatron_mtraining pretrain_gpt.py \\"
    yield from (f"    {line} \\".replace("\0", " ") for line in lines[:-1])
    yield f"    {lines[-1]}".replace("\0", " ")
