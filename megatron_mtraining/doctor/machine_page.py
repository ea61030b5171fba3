"""Findings of ``machine``, on a page for people."""

from __future__ import annotations

from typing import Any

from .machine import faults_of

_WIDTH = 20
_CHANGED_BY_LAYOUT = "replaced by layout"


def page_of(found: dict[str, Any]) -> str:
    """Return the page, without a line break at its end."""
    rows = [
        ("Python", f"{found['python']['version']} ({found['python']['executable']})"),
        ("system", found["python"]["system"]),
        *_torch_rows(found["torch"]),
        *_gpu_rows(found["gpus"]),
        ("kernels", _kernels(found["kernels"])),
        *((f"auto, head_dim {dim}", f"{each['backend']}. {each['why']}") for dim, each in found["auto"].items()),
        *_megatron_rows(found["megatron"]),
        *((name, version or "not installed") for name, version in found["beside_megatron"].items()),
    ]
    lines = ["mtraining doctor: this machine", ""]
    lines += [f"  {name:<{_WIDTH}}{text}" for name, text in rows]
    lines += [""] + [f"FAULT: {fault}" for fault in faults_of(found)]
    lines += ["" if faults_of(found) else "No fault found.", _NEXT]
    return "\n".join(line for line in lines)


_NEXT = (
    "To check a model with its flags and data: "
    "torchrun --nproc-per-node N -m megatron_mtraining doctor pretrain_gpt.py FLAGS"
)


def _torch_rows(torch: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("torch", torch["version"]),
        ("CUDA", f"of torch {torch['cuda']}" if torch["cuda"] else "a torch without CUDA"),
        ("NCCL", torch["nccl"] or "not used without a GPU"),
        ("driver", torch["driver"] or "nvidia-smi was not found, or found none"),
    ]


def _gpu_rows(gpus: dict[str, Any]) -> list[tuple[str, str]]:
    if not gpus["devices"]:
        return [("GPUs", "none; attention and tests run on the CPU")]
    rows = [
        (f"GPU {number}", f"{each['name']}, compute capability {each['capability']}, {each['memory_gib']} GiB")
        for number, each in enumerate(gpus["devices"])
    ]
    apart = [
        f"{one}-{other}"
        for one, reached in enumerate(gpus["peer_access"])
        for other, reaches in enumerate(reached)
        if one < other and not reaches
    ]
    if len(rows) > 1:
        rows.append(("peer access", f"none between GPUs {', '.join(apart)}" if apart else "between all GPUs"))
    rows += _titled("links", (gpus["links"] or "").splitlines())
    return rows


def _kernels(kernels: dict[str, Any]) -> str:
    if not kernels["built"]:
        return f"not built. {kernels['remedy']}"
    return kernels["fault"] or f"built: {kernels['build']}"


def _megatron_rows(megatron: dict[str, Any]) -> list[tuple[str, str]]:
    if megatron["version"] is None:
        missing = "of no supported release" if megatron["missing"] else "not installed, and not on PYTHONPATH"
        return [("Megatron-Core", missing)]
    training = "with" if megatron["training"] else "without"
    named = [("wrapped", megatron["wrapped"]), (_CHANGED_BY_LAYOUT, megatron["replaced"])]
    rows = [("Megatron-Core", f"{megatron['version']}, {training} megatron.training ({megatron['path']})")]
    for title, names in named:
        rows += _titled(title, names)
    return rows


def _titled(title: str, lines: list[str]) -> list[tuple[str, str]]:
    """Return a row for each line, the first one with the title."""
    return [("" if number else title, line) for number, line in enumerate(lines)]
