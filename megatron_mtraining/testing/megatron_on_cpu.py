"""A stand-in for the few CUDA calls that Megatron-Core makes unasked, so that it runs on a CPU with gloo.

Megatron-Core names CUDA in its allocations, its random state, its optimizer's type checks and its stream bookkeeping,
and in nothing that it computes. :func:`install` answers those calls on the CPU; ``torch.cuda.is_available()`` stays
False.
It is an aid for tests and demonstrations: losses and gradients are Megatron's own, timings mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_MISSING = object()
_FACTORIES = ("arange", "empty", "empty_strided", "full", "ones", "rand", "randn", "tensor", "zeros")
_undo: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Replaces the CUDA calls for the rest of the process; a second call changes nothing.

    Raises:
        RuntimeError: a GPU is there, so Megatron needs no stand-in.
    """
    if torch.cuda.is_available():
        raise RuntimeError("megatron_on_cpu must be used where CUDA is not available, got a GPU. Run Megatron on it.")
    if not _undo:
        for owner, name, replacement in _replacements():
            _undo.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, replacement)


def uninstall() -> None:
    """Puts every replaced symbol back; does nothing where nothing was replaced."""
    while _undo:
        owner, name, original = _undo.pop()
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """The stand-in for the length of a ``with`` block; leaves an outer :func:`install` in place."""
    installed_here = not _undo
    install()
    try:
        yield
    finally:
        if installed_here:
            uninstall()


class _Stream:
    """A CUDA stream as Megatron uses one: work on a CPU is in order already, so waiting is nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, _: Any = None) -> None: ...

    def wait(self, _: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _replacements() -> list[tuple[Any, str, Any]]:
    """Every replaced symbol: (owner, name, what answers instead), each with its reason."""
    from megatron.core.tensor_parallel import random as megatron_random

    cuda = torch.cuda
    return [
        # "The current device" is passed on as device= in a hundred places; the CPU is as good an answer.
        (cuda, "current_device", lambda: _CPU),
        # The RNG tracker and activation recomputation save, seed and restore the device's random state.
        (cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (cuda, "manual_seed", torch.manual_seed),
        # ... through these two of Megatron's own, which reach past torch.cuda for speed.
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        # Gradient buffers and the finalisation of gradients wait on streams.
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "current_stream", _Stream),
        (cuda, "default_stream", _Stream),
        (cuda, "stream", lambda _: contextlib.nullcontext()),
        (cuda, "synchronize", lambda *_: None),
        # Parameters, buffers and gradient norms are moved with .cuda(), batches pinned first.
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.nn.Module, "cuda", lambda self, *_: self),
        (torch.Tensor, "pin_memory", lambda self, *_: self),
        # The optimizers and gradient clipping sort parameters by the name of a CUDA tensor type.
        (torch.Tensor, "type", _type_as_on_cuda(torch.Tensor.type)),
        # Counters, overflow flags and gradient norms are allocated with device="cuda".
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
    ]


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """``factory`` with a CUDA ``device`` read as the CPU and ``pin_memory`` left out."""

    @functools.wraps(factory)
    def allocate(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return allocate


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()`` that says ``torch.cuda.FloatTensor`` where it would say ``torch.FloatTensor``."""

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_name
