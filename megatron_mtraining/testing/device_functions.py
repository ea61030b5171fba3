"""Functions of torch that take a device, found in torch itself, and a wrapper that reads a GPU there as the CPU.

No list by hand can be whole: a release of torch adds functions, and a script calls the one that was left out.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fft
import torch.nested
from torch.utils import _device

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
