"""Backend of a call: by name, or by what the machine can do."""

from __future__ import annotations

import logging
from functools import cache

import torch

from ..config import BACKENDS
from ..errors import BackendUnavailableError, invalid
from ..ranks import is_first_rank, is_first_rank_of_host
from .protocol import AttentionBackend
from .reference import ReferenceBackend

logger = logging.getLogger(__name__)


def resolve_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
) -> AttentionBackend:
    """Return the backend that computes attention for tensors like these.

    Args:
        name: ``auto`` takes the CUDA kernels where they can run, else the reference. The first rank logs which and
            why, once for each kind of call; the reference for a GPU, which may be for lack of something on one host,
            each host's first rank. ``reference`` and ``cuda`` never fall back.
        device: of the tensors, as are dtype and head_dim.
        block_size: tokens in a block of the index.

    Raises:
        ValueError: unknown ``name``.
        BackendUnavailableError: ``cuda`` was asked for and cannot run; the message says what would make it run.
    """
    if name not in BACKENDS:
        raise invalid("backend", f"one of {', '.join(BACKENDS)}", repr(name))
    if name == "reference":
        return ReferenceBackend()
    from . import cuda  # here, so that importing this package does not search for the compiled module

    reason = cuda.why_unavailable(device=device, dtype=dtype, head_dim=head_dim, block_size=block_size)
    if name == "cuda" and reason is not None:
        raise BackendUnavailableError(reason)
    if name == "auto":
        _log_choice(device.type, dtype, head_dim, block_size, reason)
    return ReferenceBackend() if reason is not None else cuda.cuda_backend()


@cache  # once for each kind of call, not once for each layer and step
def _log_choice(device_type: str, dtype: torch.dtype, head_dim: int, block_size: int, reason: str | None) -> None:
    # The reference for a GPU is a slow way that nobody chose; without a set-up of logging only warnings are seen.
    is_slow = reason is not None and device_type == "cuda"
    if not (is_first_rank_of_host() if is_slow else is_first_rank()):
        return
    case = f"{dtype}, head_dim {head_dim}, block_size {block_size} on {device_type}"
    if reason is None:
        logger.info("backend auto: cuda for %s.", case)
    else:
        logger.log(logging.WARNING if is_slow else logging.INFO, "backend auto: reference for %s. %s", case, reason)
