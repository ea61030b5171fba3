"""Differences between Megatron-Core releases, found by looking for them, never by a version string."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from typing import Any

from ..errors import SUPPORTED_MEGATRON, invalid


class MissingSymbolError(RuntimeError):
    """Error for something that this package builds on and Megatron-Core lacks; the message names it."""


def require_symbol(module_name: str, name: str, *, parameters: Iterable[str] = ()) -> Any:
    """Return ``module_name.name``, checked to exist and to take ``parameters``; ``name`` may have dots.

    Raises:
        MissingSymbolError: no such module, no such name, or a callable without one of the parameters.
    """
    remedy = f"Supported are {SUPPORTED_MEGATRON}."
    try:
        symbol = functools.reduce(getattr, name.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise MissingSymbolError(f"{module_name}.{name} must exist, got {error}. {remedy}") from error
    missing = [parameter for parameter in parameters if parameter not in inspect.signature(symbol).parameters]
    if missing:
        raise MissingSymbolError(
            f"{module_name}.{name} must take {', '.join(parameters)}, got no {', '.join(missing)}. {remedy}"
        )
    return symbol


def has_module(name: str) -> bool:
    """Return whether there is a module of this dotted name; its parents are imported, it is not."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def global_of_training(getter: str) -> Any:
    """Return ``megatron.training.<getter>()``; None where no program has imported it, or has set none."""
    training = sys.modules.get("megatron.training")
    try:
        return None if training is None else getattr(training, getter)()
    except (AssertionError, AttributeError):  # a program that parses none of Megatron's flags
        return None


def transformer_engine_attention() -> type | None:
    """Return Megatron's wrapper of TransformerEngine's attention, or None where TransformerEngine is not installed."""
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    return extension.TEDotProductAttention if extension.HAVE_TE else None


def hierarchical_sizes(cp_size: int) -> tuple[int, int] | None:
    """Return ``(inner, outer)`` of the hierarchical context-parallel groups Megatron started with; None without any.

    Raises:
        ValueError: other than two levels.
    """
    from megatron.core import parallel_state

    groups = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    if not groups:
        return None
    sizes = tuple(group.size() for group in groups)
    if len(sizes) != 2:
        raise invalid(
            "hierarchical_context_parallel_sizes",
            f"two sizes whose product is {cp_size}",
            list(sizes),
            "Pass the ranks inside a node and the number of nodes.",
        )
    return sizes


def cuda_graphs_cover_attention(config: Any) -> bool:
    """Return whether ``config`` (a TransformerConfig) captures the attention layers into CUDA graphs."""
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation == "none":
        return False
    # Named cuda_graph_scope at first and cuda_graph_modules later, where the old name stays as a deprecated alias.
    captured = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or []
    captured = captured if isinstance(captured, list) else [captured]
    names = {getattr(member, "name", member) for member in captured}
    return implementation == "full_iteration" or not names or bool(names & {"attn", "full", "full_iteration"})


def windowed_layers(config: Any) -> list[int]:
    """Return the layers, counted from 1, with a sliding window; ``config`` may be Megatron's arguments too."""
    window, skipped = getattr(config, "window_size", None), getattr(config, "window_attn_skip_freq", None)
    layers = range(1, (getattr(config, "num_layers", None) or 1) + 1) if window else ()
    is_windowed = require_symbol("megatron.core.transformer.utils", "is_layer_window_attention")
    return [layer for layer in layers if is_windowed(window, skipped, layer)]


def bounds_reach_every_stage() -> bool:
    """Return whether this Megatron sends the bounds of packed documents to every pipeline stage and tensor rank.

    Earlier releases read batches in ``megatron.training`` and left some without, where attention would cross documents.
    """
    return hasattr(importlib.import_module("megatron.core.utils"), "get_batch_on_this_tp_rank")
