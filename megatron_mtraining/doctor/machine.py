"""Versions, GPUs, kernels and Megatron of this machine, as JSON and on a page for people. Nothing is trained."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from typing import Any

import torch

from ..backends import cuda
from ..backends.resolve import resolve_backend
from ..errors import BackendUnavailableError

HEAD_DIMS = (64, 96, 128)
_BESIDE = {
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "apex": ("apex", "apex"),
    "flash_attn": ("flash-attn", "flash_attn"),
}
"""Packages that Megatron uses where they are installed: distribution and module."""

_BLOCK_SIZE = 64
_COMMAND_TIMEOUT_S = 20
_WIDTH = 20
_NEXT = (
    "To check a model with its flags and data: "
    "torchrun --nproc-per-node N -m megatron_mtraining doctor pretrain_gpt.py FLAGS"
)


def describe() -> dict[str, Any]:
    """Return everything that the page shows, as JSON can hold it; wrap Megatron as a run would."""
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable, "system": platform.platform()},
        "torch": _torch(),
        "gpus": _gpus(),
        "kernels": _kernels(),
        "auto": {str(head_dim): _choice(head_dim) for head_dim in HEAD_DIMS},
        "megatron": _megatron(),
        "beside_megatron": {name: _version(*names) for name, names in _BESIDE.items()},
    }


def faults_of(found: dict[str, Any]) -> list[str]:
    """Return the faults of this machine as sentences; an absent package is no fault."""
    kernels_fault = found["kernels"]["fault"]
    return [*found["megatron"]["missing"], *([kernels_fault] if kernels_fault else [])]


def _torch() -> dict[str, Any]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "nccl": nccl, "driver": _driver()}


def _gpus() -> dict[str, Any]:
    """Return the GPUs, which of them reach each other's memory, and nvidia-smi's table of links."""
    count = torch.cuda.device_count()
    devices = []
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        capability = f"{properties.major}.{properties.minor}"
        memory = round(properties.total_memory / 2**30, 1)
        devices.append({"name": properties.name, "capability": capability, "memory_gib": memory})
    reach = [
        [one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
        for one in range(count)
    ]
    links = _output("nvidia-smi", "topo", "-m") if count > 1 else None
    return {"devices": devices, "peer_access": reach, "links": links}


def _kernels() -> dict[str, Any]:
    """Return the compiled module's build and targets and, where it is there and cannot be used, the reason."""
    if importlib.util.find_spec(f"{cuda.__name__}._C") is None:
        return {"built": False, "build": None, "fault": None, "remedy": cuda.HOW_TO_BUILD}
    try:
        cuda.cuda_backend()
    except (BackendUnavailableError, ValueError) as error:
        return {"built": True, "build": None, "fault": str(error), "remedy": cuda.HOW_TO_BUILD}
    build = getattr(importlib.import_module(f"{cuda.__name__}._C"), "build", "not recorded")
    return {"built": True, "build": build, "fault": None, "remedy": None}


def _choice(head_dim: int) -> dict[str, str]:
    """Return the backend that ``auto`` takes for bfloat16 on the first GPU here, or the CPU, and why not the other."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    case = {"device": device, "dtype": torch.bfloat16, "head_dim": head_dim, "block_size": _BLOCK_SIZE}
    try:
        backend = resolve_backend("auto", **case).name
    except BackendUnavailableError as error:
        return {"backend": "none", "why": str(error)}
    why = cuda.why_unavailable(**case) or "The reference computes the same in plain PyTorch, slower."
    return {"backend": backend, "why": why}


def _megatron() -> dict[str, Any]:
    """Return the Megatron-Core imported here, what a run would wrap and replace in it, and what is missing."""
    found = {"version": None, "path": None, "training": False, "wrapped": [], "replaced": [], "missing": []}
    try:
        core = importlib.import_module("megatron.core")
        from ..megatron.compat import has_module
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        is_there = importlib.util.find_spec("megatron") is not None
        missing = [f"Megatron-Core must be a supported release, got {error}."] if is_there else []
        return found | {"missing": missing}
    found |= {"version": str(getattr(core, "__version__", "unknown")), "path": str(core.__path__[0])}
    found["training"] = has_module("megatron.training")
    return found | _targets()


def _targets() -> dict[str, list[str]]:
    from ..megatron import MissingSymbolError, install
    from ..megatron.split import REPLACEMENTS, TokenSplit

    wrapped, replaced, missing = [], [], []
    try:
        wrapped = install()
    except MissingSymbolError as error:
        missing.append(str(error))
    for replacements in REPLACEMENTS:
        try:
            pairs = replacements(TokenSplit("striped", _BLOCK_SIZE, None))
            replaced += [f"{original.__module__}.{original.__name__}" for original, _ in pairs]
        except MissingSymbolError as error:
            missing.append(str(error))
    return {"wrapped": sorted(wrapped), "replaced": sorted(replaced), "missing": missing}


def _version(distribution: str, module: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown" if importlib.util.find_spec(module) is not None else None


def _driver() -> str | None:
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0].strip() if versions else None


def _output(*command: str) -> str | None:
    """Return the output of a command; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None


def page_of(found: dict[str, Any]) -> str:
    """Return the page, without a line break at its end."""
    rows = [
        ("Python", f"{found['python']['version']} ({found['python']['executable']})"),
        ("system", found["python"]["system"]),
        *_torch_rows(found["torch"]),
        *_gpu_rows(found["gpus"]),
        ("kernels", _kernels_row(found["kernels"])),
        *((f"auto, head_dim {dim}", f"{each['backend']}. {each['why']}") for dim, each in found["auto"].items()),
        *_megatron_rows(found["megatron"]),
        *((name, version or "not installed") for name, version in found["beside_megatron"].items()),
    ]
    lines = ["mtraining doctor: this machine", ""]
    lines += [f"  {name:<{_WIDTH}}{text}" for name, text in rows]
    lines += [""] + [f"FAULT: {fault}" for fault in faults_of(found)]
    return "\n".join([*lines, "" if faults_of(found) else "No fault found.", _NEXT])


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


def _kernels_row(kernels: dict[str, Any]) -> str:
    if not kernels["built"]:
        return f"not built. {kernels['remedy']}"
    return kernels["fault"] or f"built: {kernels['build']}"


def _megatron_rows(megatron: dict[str, Any]) -> list[tuple[str, str]]:
    if megatron["version"] is None:
        missing = "of no supported release" if megatron["missing"] else "not installed, and not on PYTHONPATH"
        return [("Megatron-Core", missing)]
    training = "with" if megatron["training"] else "without"
    return [
        ("Megatron-Core", f"{megatron['version']}, {training} megatron.training ({megatron['path']})"),
        *_titled("wrapped", megatron["wrapped"]),
        *_titled("replaced by layout", megatron["replaced"]),
    ]


def _titled(title: str, lines: list[str]) -> list[tuple[str, str]]:
    """Return a row for each line, the first one with the title."""
    return [("" if number else title, line) for number, line in enumerate(lines)]
