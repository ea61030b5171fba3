"""Stand-in for the few CUDA calls that Megatron-Core makes unasked, so that it runs on a CPU with gloo.

Megatron-Core names CUDA in its allocations, its random state, its optimizer's type checks and its stream bookkeeping,
and in nothing that it computes. :func:`install` answers those calls on the CPU; ``torch.cuda.is_available()`` stays
False, but for ``megatron.training``, which does not start without a GPU.
It is an aid for tests and demonstrations: losses and gradients are Megatron's own, timings mean nothing. Every public
function of torch that takes a device is covered (no list by hand can be whole, so torch itself is searched); storages
and ``torch.ops`` are not.

``python -m megatron_mtraining.testing.megatron_on_cpu [-m module | script.py] [arguments]`` runs a training script, or
the launcher and a script, that way. The Megatron beside the script is found before one that is installed. Flags must
ask for what a CPU has: ``--distributed-backend gloo --use-cpu-initialization --transformer-impl local``, fusions off.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import inspect
import itertools
import os
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
import torch.fft
import torch.nested
from torch.utils import _device
from torch.utils._device import DeviceContext

_MISSING = object()
_MEMORY_COUNTERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_undo: list[tuple[Any, str, Any]] = []


def install(*, for_training: bool = False) -> None:
    """Replace the CUDA calls for the rest of the process; a second call changes nothing.

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
    """Put every replaced symbol back; do nothing where nothing was replaced."""
    while _undo:
        owner, name, original = _undo.pop()
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Install the stand-in for the length of a ``with`` block; leave an outer :func:`install` in place."""
    installed_here = not _undo
    install()
    try:
        yield
    finally:
        if installed_here:
            uninstall()


def main(argv: list[str]) -> None:
    """Run ``argv``, a script or ``-m module`` with its arguments, as Python would, with the stand-in in place."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling Megatron's small fusions takes longer than a test
    scripts = [text for text in argv if text.endswith(".py") and os.path.isfile(text)] if argv[0] == "-m" else argv
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
    """Return every replaced symbol: (owner, name, what answers instead), each with its reason."""
    from megatron.core.tensor_parallel import random as megatron_random

    cuda = torch.cuda
    return [
        # "The current device" is passed on as device= in a hundred places, and to torch.device() in a few.
        (cuda, "current_device", lambda: 0),
        *_devices(),
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
        # torch's optimizers ask the accelerator for its stream; a build for CUDA has one even where no GPU is.
        (torch.accelerator, "is_available", lambda: False),
        (torch.accelerator, "current_accelerator", lambda *_, **__: None),
        # Parameters, buffers and gradient norms are moved with .cuda(), batches pinned first.
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.nn.Module, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "pin_memory", lambda self, *_, **__: self),
        (torch.Tensor, "is_pinned", lambda self, *_, **__: False),
        # The optimizers and gradient clipping sort parameters by the name of a CUDA tensor type.
        (torch.Tensor, "type", _type_as_on_cuda(torch.Tensor.type)),
        *((cuda, name, getattr(torch, name)) for name in vars(cuda) if name.endswith("Tensor")),
        # Expert parallelism reads split sizes from the device: those that are not on one stay tensors.
        (torch.distributed, "all_to_all_single", _with_listed_sizes(torch.distributed.all_to_all_single)),
    ]


def _devices() -> Iterator[tuple[Any, str, Any]]:
    """Yield what reads a device: every function that takes one, and the classes."""
    for owner, name, position in device_functions():
        yield owner, name, on_cpu(getattr(owner, name), position)
    yield torch.nn.Module, "to", on_cpu(torch.nn.Module.to, 1)
    # ``with torch.device("cuda")`` and torch.set_default_device, which add their device to a call themselves.
    yield DeviceContext, "__init__", on_cpu(DeviceContext.__init__, 1)
    yield torch, "Generator", _substitute_class(torch.Generator, on_cpu(torch.Generator, 0))
    # A CPU build of torch raises at torch.device(0).
    yield torch, "device", _substitute_class(torch.device, _device_of_number(torch.device))


def _of_a_gpu() -> Iterator[tuple[Any, str, Any]]:
    """Yield what ``megatron.training`` asks of a GPU before and while it trains: presence, how new, how full."""
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
    )
    from megatron.core.datasets import utils
    from megatron.training import initialize  # by now a GPU seems to be there

    # Runs make where the package is installed, though the wheel has the module and no Makefile.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        yield utils, "compile_helpers", lambda: None

    # Warms up what is compiled, with random numbers as many as a rank has tokens. On a GPU they are drawn from a stream
    # of their own; here they would give each number of ranks other weights.
    yield initialize, "_warmup_jit_function", lambda *_, **__: None


def _substitute_class(original: type, make: Callable[..., Any]) -> type:
    """Return a class in place of ``original``: its calls are ``make``'s, its instances those of ``original``."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    # Pickled by this name, as the original is.
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return Meta(original.__name__, (), names)


def _device_of_number(original: type[torch.device]) -> Callable[..., torch.device]:
    """Return ``torch.device`` with a lone number read as that GPU."""

    def make(*args: Any, **kwargs: Any) -> torch.device:
        if len(args) == 1 and not kwargs and isinstance(args[0], int):
            args = ("cuda", *args)
        return original(*args, **kwargs)

    return make


def _with_listed_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``all_to_all_single`` that takes its split sizes as tensors too."""

    @functools.wraps(original)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(call.arguments.get(name), torch.Tensor):
                call.arguments[name] = call.arguments[name].tolist()
        return original(*call.args, **call.kwargs)

    return all_to_all_single


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Tensor.type`` that says and reads ``torch.cuda.FloatTensor`` in the place of ``torch.FloatTensor``."""

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        args = tuple(arg.replace("torch.cuda.", "torch.") if isinstance(arg, str) else arg for arg in args)
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_name


CPU = torch.device("cpu")
_OWNERS = ((torch, "aten::"), (torch.Tensor, "aten::"), (torch.fft, "aten::fft_"), (torch.nested, "aten::nested_"))
_DOCUMENTED = re.compile(r"\s*\w+\(.*\bdevice=")


def device_functions() -> list[tuple[Any, str, int | None]]:
    """Return every public function of torch that takes a device: owner, name, and the device's position, if any.

    Four sources, none of them whole: the schemas of operators, the functions that ``with torch.device(...)`` applies
    to, the signatures of Python functions, and the one that heads the documentation of others. Must be called before
    any function is replaced: torch keeps what ``torch.utils._device._device_constructors`` finds the first time.
    """
    operators, constructors = _operators_with_device(), _device._device_constructors()
    found = []
    for owner, prefix in _OWNERS:
        for name in dir(owner):
            function = getattr(owner, name, None)
            if isinstance(function, type) or not callable(function) or not _makes_tensors(name):
                continue
            if prefix + name in operators:
                found.append((owner, name, operators[prefix + name]))
            elif "device" in (parameters := _parameters(function)):
                found.append((owner, name, parameters.index("device")))
            elif function in constructors or _DOCUMENTED.match(function.__doc__ or ""):
                found.append((owner, name, None))
    return found


def on_cpu(function: Callable[..., Any], position: int | None = None) -> Callable[..., Any]:
    """Wrap ``function`` to read a GPU as ``device``, keyword or at ``position``, as the CPU; no pinned memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position and _names_gpu(args[position]):
            args = (*args[:position], CPU, *args[position + 1 :])
        if _names_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _names_gpu(device: Any) -> bool:
    """Return whether it is ``"cuda"``, ``"cuda:1"``, a ``torch.device`` of that type, or the number of a GPU."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, torch.device) and device.type == "cuda"


def _operators_with_device() -> dict[str, int | None]:
    """Return the operators with a ``device``: its position, or None where it must be named."""
    positions: dict[str, int | None] = {}
    for schema in torch._C._jit_get_all_schemas():
        for position, argument in enumerate(schema.arguments):
            if argument.name == "device" and schema.name.startswith("aten::"):
                known = positions.get(schema.name)
                positions[schema.name] = known if argument.kwarg_only else position
    return positions


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return names of a Python function's parameters; none of a function that is compiled."""
    return list(inspect.signature(function).parameters) if isinstance(function, types.FunctionType) else []


def _makes_tensors(name: str) -> bool:
    """Return whether a function makes tensors: not private, no ``get_`` or ``set_``, no ``Tensor.cuda`` or ``xpu``."""
    if name.startswith(("_", "get_", "set_")):
        return False
    try:
        torch.device(name)
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
