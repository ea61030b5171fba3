"""CUDA kernels for the operations of ``backends/protocol.py``. Optional: everything else works without them."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch

from ...errors import BackendUnavailableError
from .interface import HOW_TO_BUILD, interface_digest

if TYPE_CHECKING:
    from types import ModuleType

    from ..protocol import AttentionBackend

HEAD_DIMS = (64, 96, 128)
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
"""Dtypes that the kernels compute in, by their numbers in csrc/params.h."""

BLOCK_SIZE = 64


def why_unavailable(*, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Return one sentence on why the CUDA kernels cannot compute this case and what would help, or None if they can."""
    if device.type != "cuda":
        return f"The CUDA kernels need tensors on a GPU, got {device}. Move them there, or use backend='reference'."
    if dtype not in DTYPES:
        return f"The CUDA kernels compute in bfloat16 or float16, got {dtype}. Cast query, key and value."
    if head_dim not in HEAD_DIMS:
        return f"The CUDA kernels support head_dim {', '.join(map(str, HEAD_DIMS))}, got {head_dim}."
    if block_size != BLOCK_SIZE:
        return f"The CUDA kernels support block_size {BLOCK_SIZE}, got {block_size}. Set it in MTrainingConfig."
    # What a build would not change comes before it, so that nobody builds for nothing.
    if importlib.util.find_spec(f"{__name__}._C") is None:
        return f"The CUDA kernels are not built. {HOW_TO_BUILD}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"The CUDA kernels need compute capability 8.0, got {torch.cuda.get_device_name(device)}."
    return None


def cuda_backend(*, family: str | None = None) -> AttentionBackend:
    """Return the CUDA kernels as a backend. Every kernel repeats bit for bit.

    Args:
        family: ``sm80`` (mma.sync, every GPU) or ``sm90`` (Hopper); None selects the value of the environment
            variable MTRAINING_KERNELS, or the fastest family of the device.

    Raises:
        BackendUnavailableError: the kernels are not built, cannot be loaded, are older than the sources beside them,
            or lack the family.
    """
    _check_build()
    from .backend import CudaBackend

    return CudaBackend(family=family)


def selection_passes() -> ModuleType:
    """Return the passes of a selection: the module ``probe_operators``.

    Raises:
        BackendUnavailableError: the kernels are not built, cannot be loaded or are older than the sources beside them.
    """
    _check_build()
    from . import probe_operators

    return probe_operators


@functools.cache  # called by every attention call
def _check_build() -> None:
    try:
        from . import _C
    except ImportError as error:
        raise BackendUnavailableError(f"The CUDA kernels cannot be loaded: {error}. {HOW_TO_BUILD}") from error
    expected, built = interface_digest(), getattr(_C, "interface", "an older one")
    if expected not in (None, built):
        raise BackendUnavailableError(
            f"The CUDA kernels must be built from the sources beside them, interface {expected}, got {built}. "
            f"{HOW_TO_BUILD}"
        )
