"""Registration of a Python launcher as a torch operator with little host overhead.

``torch.library.custom_op`` makes such operators too, but a call of one enters Python at three dispatch keys: for
autograd, for version counters and for the device. Here a call enters Python once, for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

NAMESPACE = "mtraining"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _nothing(*args: object) -> None:
    """Do nothing for fake tensors: results have the shape and dtype of the arguments they are written to."""


def operator(
    *, mutates_args: Sequence[str] = (), fake: Callable[..., Tensor | None] = _nothing, device_type: str = "cuda"
) -> Callable[[Callable[..., Tensor | None]], torch._ops.OpOverload]:
    """Make the decorated function the operator ``mtraining::<its name>``; its annotations are the schema.

    The operator traces under torch.compile. Version counters of the tensors that it writes increase. It has no
    derivative and raises RuntimeError where one would be recorded; so it is called in a torch.autograd.Function or
    under no_grad.

    Args:
        mutates_args: the parameters that it writes.
        fake: makes the result for fake tensors, for an operator that returns one.
        device_type: where its tensors are.
    """

    def define(launch: Callable[..., Tensor | None]) -> torch._ops.OpOverload:
        name, parameters = launch.__name__, list(inspect.signature(launch).parameters)
        mutated = [parameters.index(parameter) for parameter in mutates_args]

        def run(*args: object) -> Tensor | None:
            _check_no_derivative_is_wanted(name, args)
            result = launch(*args)
            for position in mutated:
                if args[position] is not None:
                    increment_version(args[position])
            return result

        def trace(*args: object) -> Tensor | None:
            _check_no_derivative_is_wanted(name, args)
            return fake(*args)

        schema = torch.library.infer_schema(launch, mutates_args=mutates_args)
        _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, run, device_type.upper())
        torch.library.register_fake(f"{NAMESPACE}::{name}", trace, lib=_library)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define


def _check_no_derivative_is_wanted(name: str, args: Sequence[object]) -> None:
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise RuntimeError(
            f"Tensors of {NAMESPACE}::{name} must not require gradients, got some that do: it has no derivative. "
            "Call it in a torch.autograd.Function or under torch.no_grad()."
        )
