"""Plans as a table, the best one in parts, and all of it as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from .flags import command_lines, model_flags, plan_flags
from .memory import GIB
from .search import Candidate, Request, length_note

_HEAD = (
    f"{'tp':>3} {'cp':>4} {'pp':>3} {'dp':>4}  {'layout':<14}{'schedule':<14}{'recompute':<11}{'optimizer':<10}"
    f"{'GiB':>7}{'s/step':>9}{'tokens/s/GPU':>14}"
)


def report_lines(request: Request, candidates: Sequence[Candidate], *, rows: int) -> Iterator[str]:
    """What the command prints."""
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
    """Everything that was found, as JSON: bytes and seconds."""
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
