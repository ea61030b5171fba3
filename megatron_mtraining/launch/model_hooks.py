"""Hooks that give models built with ``attention_backend=mtraining`` this attention, whoever made their layer specs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..megatron import replace_core_attention
from ..megatron.compat import has_module, require_symbol
from ..megatron.patching import Patches
from ..megatron.refusals import check_index_sharing
from ..megatron.runtime import current_runtime
from .report import say_once
from .settings import SETTINGS, UsageError
from .training_hooks import ensure_runtime

_GPT = ("megatron.core.models.gpt.gpt_model", "GPTModel", ("transformer_layer_spec", "mtp_block_spec"))
_HYBRID = ("megatron.core.models.hybrid.hybrid_model", "HybridModel", ("hybrid_stack_spec",))
_MAMBA = ("megatron.core.models.mamba.mamba_model", "MambaModel", ("mamba_stack_spec",))
"""Name of HybridModel before core 0.18, and of a wrapper of it since."""
_GENERATION = (
    "megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper",
    "AbstractModelInferenceWrapper",
)
"""Wrapper that every engine that generates text puts around its model."""


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


def install_generation_hook(patches: Patches, backend: Any) -> None:
    """Wrap the constructor of what generates text with a model.

    Args:
        patches: takes the wrapper.
        backend: the member ``AttnBackend.mtraining``.

    Raises:
        MissingSymbolError: this Megatron generates text another way.
    """
    patches.wrap_init(*_GENERATION, functools.partial(_generate, backend), parameters=("model",))


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


def sparse_spec(spec: Any, name: str) -> Any:
    """Copy the layer spec ``spec`` with this attention, said once; return ``spec`` itself where it describes no layer.

    Raises:
        ValueError: layers without a causal self attention.
    """
    SETTINGS.model_built = True
    if not _has_layers(spec):
        return spec
    sparse, num_replaced, kept = replace_core_attention(spec)
    beside = f", beside {', '.join(kept)}" if kept else ""
    say_once(f"{num_replaced} core_attention of {name} replaced{beside}.")
    return sparse


def _has_layers(spec: Any) -> bool:
    """Return whether a spec describes any layer: a pipeline stage may hold none, or a model no prediction layers."""
    block = getattr(spec, "submodules", None) or spec
    return spec is not None and getattr(block, "layer_specs", None) != []
