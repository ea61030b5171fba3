"""Hooks in ``megatron.training``: its flags, the check of its arguments, its groups and its steps."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from ..arguments import add_arguments, config_from_args, health_monitor_timeout_s
from ..megatron import destroy, initialize, is_initialized, meter, set_training_step
from ..megatron.compat import has_module
from ..megatron.flag_refusals import check_arguments
from ..megatron.patching import Patches
from ..megatron.runtime import current_runtime
from ..transport.health_monitor import start_health_monitor, stop_health_monitor
from .parser_errors import flags_of, say_errors_once
from .report import say_once
from .settings import SETTINGS, UsageError

_ARGUMENTS, _TRAINING = "megatron.training.arguments", "megatron.training.training"
_STATE = "megatron.core.parallel_state"


def ensure_runtime() -> None:
    """Prepare groups, layout and, where its flag asks for one, the health monitor by the configuration of this run.

    A collective over all ranks, the first time. A program without Megatron's flags may have done so itself.
    """
    if SETTINGS.args is None and is_initialized():
        return
    runtime = initialize(SETTINGS.config())
    timeout_s = 0 if SETTINGS.args is None else health_monitor_timeout_s(SETTINGS.args)
    if timeout_s:
        start_health_monitor(timeout_s=timeout_s, training_step=_training_step)
    say_once(f"{runtime.config}, {runtime.cp_group.size()} context-parallel ranks, {runtime.inner_size} in a node.")


def install_group_hooks(patches: Patches) -> None:
    """Have the runtime follow Megatron's groups: made right after them if the backend is chosen, ended before them."""
    patches.wrap(_STATE, "initialize_model_parallel", _initialize_model_parallel)
    patches.wrap(_STATE, "destroy_model_parallel", _destroy_model_parallel)


def install_training_hooks(patches: Patches, backend: Any) -> None:
    """Wrap what a training script runs through in ``megatron.training``; nothing where there is only megatron.core.

    Args:
        patches: takes the wrappers.
        backend: the member ``AttnBackend.mtraining``.

    Raises:
        MissingSymbolError: this Megatron parses its arguments or steps through training another way.
    """
    if not has_module("megatron.training"):
        return
    patches.wrap(_ARGUMENTS, "add_megatron_arguments", _add_megatron_arguments, parameters=("parser",))
    patches.wrap(
        _ARGUMENTS,
        "validate_args",
        lambda original, args, *rest, **options: _validate_args(backend, original, args, *rest, **options),
        parameters=("args",),
    )
    patches.wrap(_TRAINING, "train_step", _train_step, parameters=("iteration",))
    patches.wrap(_TRAINING, "evaluate_and_print_results", _evaluate, parameters=("iteration",))


def choose(args: Namespace, backend: Any) -> None:
    """Note whether ``args``, Megatron's validated arguments, choose this backend, and check them if so.

    Raises:
        UsageError: a flag's value out of its range, or flags that do not go together.
    """
    SETTINGS.args = args if args.attention_backend is backend else None
    if SETTINGS.args is None:
        say_once(f"nothing is replaced: --attention-backend is {args.attention_backend.name}, not mtraining.")
        return
    _leave_out_the_mask(args)
    try:
        config = config_from_args(args)
        check_arguments(args, config)
        health_monitor_timeout_s(args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    meter.install()


def _leave_out_the_mask(args: Namespace) -> None:
    """Have the dataloader make no mask of seq x seq, Megatron's default, where it would only be the causal one."""
    if getattr(args, "create_attention_mask_in_dataloader", False) and not args.reset_attention_mask:
        args.create_attention_mask_in_dataloader = False
        say_once("--no-create-attention-mask-in-dataloader is set: attention is causal without a mask.")


def _add_megatron_arguments(original: Callable[..., ArgumentParser], parser: ArgumentParser) -> ArgumentParser:
    try:
        defaults = SETTINGS.defaults()
    except ValueError as error:  # of the file that MTRAINING_CONFIG names
        raise UsageError(str(error)) from error
    parser = add_arguments(original(parser), defaults=defaults)
    SETTINGS.flags = flags_of(parser)
    return say_errors_once(parser)


def _validate_args(backend: Any, original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any) -> Any:
    validated = original(args, *rest, **options)
    choose(args, backend)
    return validated


def _initialize_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    if SETTINGS.args is not None:
        ensure_runtime()


def _destroy_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    stop_health_monitor()
    destroy()
    original(*args, **kwargs)


def _training_step() -> int | None:
    return current_runtime().training_step if is_initialized() else None


def _train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step of training: count the steps done before and after it, as a resumed run does too."""
    iteration = _iteration(original, args, kwargs)
    count_step(iteration)
    result = original(*args, **kwargs)
    count_step(iteration, done=1)
    return result


def _evaluate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an evaluation, which a run may begin with."""
    count_step(_iteration(original, args, kwargs))
    return original(*args, **kwargs)


def _iteration(function: Callable[..., Any], args: Any, kwargs: Any) -> int | None:
    return inspect.signature(function).bind(*args, **kwargs).arguments.get("iteration")


def count_step(iteration: int | None, *, done: int = 0) -> None:
    """Record that ``iteration + done`` steps are done; do nothing without a runtime, or where Megatron counts none.

    Raises:
        UsageError: the backend is chosen and no model asked for it, so that all attention would be Megatron's own.
    """
    if SETTINGS.args is not None and not SETTINGS.model_built:
        raise UsageError(
            "--attention-backend must be another for a script without GPTModel and HybridModel, got mtraining. "
            "Only their attention is replaced."
        )
    if iteration is not None and is_initialized():
        set_training_step(iteration + done)
