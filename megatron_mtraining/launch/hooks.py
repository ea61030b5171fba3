"""The one call that makes Megatron know this backend, and the hooks that it puts on.

They give models built with ``attention_backend=mtraining`` this attention, whoever made their layer specs; around that
they follow ``megatron.training``: its flags, the check of its arguments, its groups and its steps.
"""

from __future__ import annotations

import functools
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from ..arguments import add_arguments, config_from_args, health_monitor_timeout_s
from ..config import MTrainingConfig
from ..megatron import destroy, initialize, is_initialized, meter, replace_core_attention, set_training_step
from ..megatron.compat import MissingSymbolError, has_module, require_symbol
from ..megatron.flag_refusals import check_arguments
from ..megatron.patching import Patches
from ..megatron.refusals import check_index_sharing
from ..megatron.runtime import current_runtime
from ..transport.health_monitor import start_health_monitor, stop_health_monitor
from .flag_errors import flags_of, say_errors_once
from .report import BACKEND, SETTINGS, UsageError, say_once

_ENUMS = "megatron.core.transformer.enums"
_GPT = ("megatron.core.models.gpt.gpt_model", "GPTModel", ("transformer_layer_spec", "mtp_block_spec"))
_HYBRID = ("megatron.core.models.hybrid.hybrid_model", "HybridModel", ("hybrid_stack_spec",))
_MAMBA = ("megatron.core.models.mamba.mamba_model", "MambaModel", ("mamba_stack_spec",))
"""Name of HybridModel before core 0.18, and of a wrapper of it since."""
_GENERATION = (
    "megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper",
    "AbstractModelInferenceWrapper",
)
"""Wrapper that every engine that generates text puts around its model."""

_ARGUMENTS, _TRAINING = "megatron.training.arguments", "megatron.training.training"
_STATE = "megatron.core.parallel_state"
_INSTANTIATE = "megatron.training.config.instantiate_utils"

_PATCHES = Patches()


def install(config: MTrainingConfig | None = None) -> tuple[str, ...]:
    """Add ``attention_backend=mtraining`` to Megatron, its flags, and the hooks that act once it is chosen.

    Call it before the training script, or Megatron's parser, is imported. Where the backend is not chosen the hooks
    hand every call through. A second call changes nothing but the configuration.

    Args:
        config: for programs that do not parse Megatron's command line, and the defaults of the flags for those that do.
            Default: the file that ``MTRAINING_CONFIG`` names, else the defaults of the dataclass.

    Returns:
        Dotted names of the functions and classes of Megatron that are wrapped.

    Raises:
        MissingSymbolError: this Megatron lacks something that is wrapped; nothing stays wrapped then.
    """
    if config is not None:
        SETTINGS.given = config
    try:
        backend = extend_attention_backend()
        install_model_hooks(_PATCHES, backend)
        install_generation_hook(_PATCHES, backend)
        install_group_hooks(_PATCHES)
        install_training_hooks(_PATCHES, backend)
        if has_module(_INSTANTIATE):  # so that its YAML may say ``_target_: megatron_mtraining.MTrainingConfig``
            require_symbol(_INSTANTIATE, "target_allowlist.add_prefix")("megatron_mtraining.")
    except MissingSymbolError:
        uninstall()
        raise
    return _PATCHES.targets


def uninstall() -> None:
    """Take every hook off again, the meter's too, and forget what was chosen; the enum keeps its member."""
    _PATCHES.undo()
    meter.uninstall()
    SETTINGS.given, SETTINGS.args, SETTINGS.model_built = None, None, False


def extend_attention_backend() -> Any:
    """Add the member ``mtraining`` to Megatron's ``AttnBackend`` and return it; a second call changes nothing.

    Megatron's parser takes its choices from the members, so call it before the parser is built. The member pickles as
    ``auto``: Megatron stores its arguments in every checkpoint, and one without this package must be able to read them.

    Raises:
        MissingSymbolError: this Megatron has no ``AttnBackend`` with a member ``auto``.
    """
    backends, auto = require_symbol(_ENUMS, "AttnBackend"), require_symbol(_ENUMS, "AttnBackend.auto")
    member = backends.__members__.get(BACKEND) or _add_member(backends)
    member.__reduce_ex__ = lambda _protocol: (backends, (auto.value,))
    return member


def _add_member(enum: Any) -> Any:
    """Add a member as Python does for each line in the body of an Enum.

    The value is the name, which no later release can give to a member of its own as it could a number.
    """
    member = object.__new__(enum)
    member._name_, member._value_ = BACKEND, BACKEND
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    enum._member_names_.append(BACKEND)
    enum._member_map_[BACKEND] = member
    enum._value2member_map_[BACKEND] = member
    type.__setattr__(enum, BACKEND, member)
    return member


def install_model_hooks(patches: Patches, backend: Any) -> None:
    """Wrap the constructors of GPTModel and HybridModel (MambaModel in earlier releases).

    Args:
        patches: takes the wrappers.
        backend: the member ``AttnBackend.mtraining``.

    Raises:
        MissingSymbolError: this Megatron builds models from other specs.
    """
    hybrid = _HYBRID if has_module("megatron.core.models.hybrid") else _MAMBA
    for module_name, name, specs in (_GPT, hybrid):
        build = functools.partial(_build, name, specs, backend)
        patches.wrap_init(module_name, name, build, parameters=("config", *specs))


def _build(
    model: str, specs: tuple[str, ...], backend: Any, original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Call the constructor ``original`` of a model; groups, layout and copies of its ``specs`` are made ready first."""
    call = inspect.signature(original).bind(*args, **kwargs)
    if call.arguments["config"].attention_backend is backend:
        ensure_runtime()
        check_index_sharing(call.arguments["config"], index_sharing=current_runtime().config.index_sharing)
        for name in filter(call.arguments.__contains__, specs):
            call.arguments[name] = sparse_spec(call.arguments[name], f"{model}'s {name}")
    original(*call.args, **call.kwargs)


def sparse_spec(spec: Any, name: str) -> Any:
    """Copy the layer spec ``spec`` with this attention, said once; return ``spec`` itself where it describes no layer.

    Raises:
        ValueError: layers without a causal self attention.
    """
    SETTINGS.model_built = True
    block = getattr(spec, "submodules", None) or spec
    # A pipeline stage may hold no layer, or a model no prediction layers.
    if spec is None or getattr(block, "layer_specs", None) == []:
        return spec
    sparse, num_replaced, kept = replace_core_attention(spec)
    beside = f", beside {', '.join(kept)}" if kept else ""
    say_once(f"{num_replaced} core_attention of {name} replaced{beside}.")
    return sparse


def install_generation_hook(patches: Patches, backend: Any) -> None:
    """Wrap the constructor of what generates text with a model.

    Args:
        patches: takes the wrapper.
        backend: the member ``AttnBackend.mtraining``.

    Raises:
        MissingSymbolError: this Megatron generates text another way.
    """
    patches.wrap_init(*_GENERATION, functools.partial(_generate, backend), parameters=("model",))


def _generate(backend: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call the constructor ``original`` of a text generator, whose engines attend past ``core_attention``.

    Raises:
        UsageError: the model asks for this backend, which would be ignored.
    """
    model = inspect.signature(original).bind(*args, **kwargs).arguments["model"]
    config = require_symbol("megatron.core.utils", "get_model_config")(model)
    if config.attention_backend is backend:
        if not getattr(SETTINGS.args, "perform_rl_step", False):
            raise UsageError(
                "--attention-backend must be another to generate text, got mtraining. "
                "This is attention for training; its checkpoints load without it."
            )
        say_once("rollouts are generated with Megatron's own attention to every key; training attends sparsely.")
    original(*args, **kwargs)


def install_group_hooks(patches: Patches) -> None:
    """Have the runtime follow Megatron's groups: made right after them if the backend is chosen, ended before them."""
    patches.wrap(_STATE, "initialize_model_parallel", _initialize_model_parallel)
    patches.wrap(_STATE, "destroy_model_parallel", _destroy_model_parallel)


def _initialize_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    if SETTINGS.args is not None:
        ensure_runtime()


def _destroy_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    stop_health_monitor()
    destroy()
    original(*args, **kwargs)


def ensure_runtime() -> None:
    """Prepare groups, layout and, where its flag asks for one, the health monitor by the configuration of this run.

    A collective over all ranks, the first time. A program without Megatron's flags may have done so itself.
    """
    if SETTINGS.args is None and is_initialized():
        return
    runtime = initialize(SETTINGS.config())
    timeout_s = 0 if SETTINGS.args is None else health_monitor_timeout_s(SETTINGS.args)
    if timeout_s:
        start_health_monitor(
            timeout_s=timeout_s,
            training_step=lambda: current_runtime().training_step if is_initialized() else None,
        )
    say_once(f"{runtime.config}, {runtime.cp_group.size()} context-parallel ranks, {runtime.inner_size} in a node.")


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
    patches.wrap(_ARGUMENTS, "validate_args", functools.partial(_validate_args, backend), parameters=("args",))
    patches.wrap(_TRAINING, "train_step", _train_step, parameters=("iteration",))
    patches.wrap(_TRAINING, "evaluate_and_print_results", _evaluate, parameters=("iteration",))


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


def choose(args: Namespace, backend: Any) -> None:
    """Note whether ``args``, Megatron's validated arguments, choose this backend, and check them if so.

    Raises:
        UsageError: a flag's value out of its range, or flags that do not go together.
    """
    SETTINGS.args = args if args.attention_backend is backend else None
    if SETTINGS.args is None:
        say_once(f"nothing is replaced: --attention-backend is {args.attention_backend.name}, not mtraining.")
        return
    if getattr(args, "create_attention_mask_in_dataloader", False) and not args.reset_attention_mask:
        args.create_attention_mask_in_dataloader = False  # a mask of seq x seq that would only be the causal one
        say_once("--no-create-attention-mask-in-dataloader is set: attention is causal without a mask.")
    try:
        config = config_from_args(args)
        check_arguments(args, config)
        health_monitor_timeout_s(args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    meter.install()


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
