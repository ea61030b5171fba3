"""CUDA kernels behind the operations of ``ops/backend.py``. Optional: everything else works without them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from ..errors import BackendUnavailableError

if TYPE_CHECKING:
    from ..ops.backend import AttentionBackend

BUILD_COMMAND = "MTRAINING_CUDA=1 pip install --no-build-isolation ."


def why_unavailable(*, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """One sentence on why the CUDA kernels cannot compute this case and what would change that, or None if they can."""
    if importlib.util.find_spec(f"{__name__}._C") is None:
        return f"The CUDA kernels are not built. Run `{BUILD_COMMAND}` on a machine with nvcc."
    if device.type != "cuda":
        return f"The CUDA kernels need tensors on a GPU, got {device}. Move them there, or use backend='reference'."
    return None


def cuda_backend(*, deterministic: bool = False) -> AttentionBackend:
    """The CUDA kernels as a backend.

    Raises:
        BackendUnavailableError: the kernels are not built.
    """
    raise BackendUnavailableError(f"The CUDA kernels are not built. Run `{BUILD_COMMAND}` on a machine with nvcc.")
