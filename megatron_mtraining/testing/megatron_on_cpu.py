"""A stand-in for the few CUDA calls that Megatron-Core makes unasked, so that it runs on a CPU with gloo.

Megatron-Core names CUDA in its allocations, its random state, its optimizer's type checks and its stream bookkeeping,
and in nothing that it computes. :func:`install` answers those calls on the CPU; ``torch.cuda.is_available()`` stays
False, but for ``megatron.training``, which does not start without a GPU.
It is an aid for tests and demonstrations: losses and gradients are Megatron's own, timings mean nothing.

``python -m megatron_mtraining.testing.megatron_on_cpu [-m module | script.py] [arguments]`` runs a training script, or
the launcher and a script, that way. The Megatron beside the script is found before one that is installed. Flags must
ask for what a CPU has: ``--distributed-backend gloo --use-cpu-initialization --transformer-impl local``, fusions off.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import itertools
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _CurrentDevice(str):
    """The CPU where a device is named by it, and a number in the name of a GPU: ``f"cuda:{current_device()}"``."""

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return "0"


_CPU = torch.device("cpu")
_MISSING = object()
_FACTORIES = ("arange", "empty", "empty_strided", "full", "ones", "rand", "randn", "tensor", "zeros")
_MEMORY_COUNTERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_undo: list[tuple[Any, str, Any]] = []


def install(*, for_training: bool = False) -> None:
    """Replaces the CUDA calls for the rest of the process; a second call changes nothing.

    Args:
        for_training: whether ``megatron.training`` shall start, which asks for a GPU and for what it knows of one.

    Raises:
        RuntimeError: a GPU is there, so Megatron needs no stand-in.
    """
    if torch.cuda.is_available():
        raise RuntimeError("megatron_on_cpu must be used where CUDA is not available, got a GPU. Run Megatron on it.")
    if not _undo:
        for owner, name, replacement in itertools.chain(_replacements(), _of_a_gpu() if for_training else ()):
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


def main(argv: list[str]) -> None:
    """Runs ``argv``, a script or ``-m module`` with its arguments, as Python would, with the stand-in in place."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling Megatron's small fusions takes longer than a test
    scripts = [word for word in argv if word.endswith(".py") and os.path.isfile(word)] if argv[0] == "-m" else argv
    script = next(iter(scripts), None)
    if script is not None:  # its folder first, as Python has it: the stand-in is the first to import Megatron
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    install(for_training=True)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


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
        (cuda, "current_device", lambda: _CurrentDevice("cpu")),
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


def _of_a_gpu() -> Iterator[tuple[Any, str, Any]]:
    """What ``megatron.training`` asks of a GPU before and while it trains: that it is there, how new, how full."""
    cuda = torch.cuda
    properties = types.SimpleNamespace(major=9, minor=0, name="CPU", total_memory=1 << 34, multi_processor_count=1)
    yield from (
        (cuda, "is_available", lambda: True),
        # Groups are only made where there are devices; each rank takes one by its number.
        (cuda, "device_count", lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        (cuda, "set_device", lambda _: None),
        (cuda, "get_device_capability", lambda *_: (9, 0)),
        (cuda, "get_device_properties", lambda *_: properties),
        (cuda, "memory_stats", lambda *_: collections.defaultdict(int)),
        (cuda, "mem_get_info", lambda *_: (1 << 34, 1 << 34)),
        *((cuda, name, lambda *_, **__: 0) for name in _MEMORY_COUNTERS),
        *((cuda, name, lambda *_, **__: None) for name in ("empty_cache", "reset_peak_memory_stats")),
        *((owner, "is_current_stream_capturing", lambda: False) for owner in (cuda, cuda.graphs)),
        # Loss scales and masks are moved by name of the device.
        (torch.Tensor, "to", _to_cpu(torch.Tensor.to)),
    )
    from megatron.core.datasets import utils
    from megatron.training import initialize  # by now a GPU seems to be there

    # Runs make where the package is installed, though the wheel has the module and no Makefile.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        yield utils, "compile_helpers", lambda: None

    # Warms up what is compiled, with random numbers as many as a rank has tokens. On a GPU they are drawn from a stream
    # of their own; here they would give each number of ranks other weights.
    yield initialize, "_warmup_jit_function", lambda *_, **__: None


def _to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to`` that stays on the CPU when sent to a GPU."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        places = [_CPU if isinstance(arg, (str, torch.device)) and str(arg).startswith("cuda") else arg for arg in args]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return original(self, *places, **kwargs)

    return to


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


if __name__ == "__main__":
    main(sys.argv[1:])
