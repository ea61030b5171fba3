"""Symbols of Megatron-Core: differences between releases, and replacement of a function by another.

Differences are found by the presence of a symbol, never by a version string.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import SUPPORTED_MEGATRON, invalid


class MissingSymbolError(RuntimeError):
    """Error for a symbol of Megatron-Core that this package needs and that is missing; the message names it."""


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


def models() -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return module and name of each model of this release, and the parameters that are its layer specs.

    MambaModel is the name of HybridModel before core 0.18, and of a wrapper of it since.
    """
    hybrid = ("megatron.core.models.hybrid.hybrid_model", "HybridModel", ("hybrid_stack_spec",))
    mamba = ("megatron.core.models.mamba.mamba_model", "MambaModel", ("mamba_stack_spec",))
    return (
        ("megatron.core.models.gpt.gpt_model", "GPTModel", ("transformer_layer_spec", "mtp_block_spec")),
        hybrid if has_module(hybrid[0]) else mamba,
    )


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
    """Return whether ``config`` (a TransformerConfig, or Megatron's arguments) captures attention into CUDA graphs."""
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation == "none":
        return False
    # Named cuda_graph_scope at first and cuda_graph_modules later, where the old name remains as a deprecated alias.
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

    Earlier releases read batches in ``megatron.training`` and sent some stages no bounds: attention would cross
    documents.
    """
    return hasattr(importlib.import_module("megatron.core.utils"), "get_batch_on_this_tp_rank")


def arguments_of(function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``function(*args, **kwargs)`` by name; those left at their defaults are absent."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def rebind(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Point every module attribute that is an old object at its new one: ``from module import name`` makes many.

    New objects must not be bound in a module here: they would be rebound themselves when the old ones return.

    Args:
        pairs: old and new. One call for many is as fast as one for each would be slow: all modules are searched.
    """
    new_of = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()):
        names = dict(getattr(module, "__dict__", {}))
        if new_of.keys().isdisjoint(map(id, names.values())):
            continue
        for name, value in names.items():
            if id(value) in new_of:
                setattr(module, name, new_of[id(value)])


class Patches:
    """Replaced and wrapped functions of Megatron, which are restored together."""

    def __init__(self) -> None:
        self._functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._methods: dict[str, Callable[[], None]] = {}
        self._after_undo: list[Callable[[], None]] = []

    def wrap(
        self, module_name: str, name: str, wrapper: Callable[..., Any], *, parameters: tuple[str, ...] = ()
    ) -> None:
        """Pass every call of ``module_name.name`` to ``wrapper(original, *args, **kwargs)``.

        Args:
            module_name: where the function is defined; it is replaced wherever else it is bound by name too.
            name: of a function, or ``Class.method``. A second call with the same names changes nothing.
            wrapper: takes the original first.
            parameters: names that the function must take for the wrapper to be right.

        Raises:
            MissingSymbolError: this Megatron has no such function, or one without these parameters.
        """
        target = f"{module_name}.{name}".removesuffix(".__init__")
        if target in self.targets:
            return
        original = require_symbol(module_name, name, parameters=parameters)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        owner, _, method = name.rpartition(".")
        if owner:
            cls = require_symbol(module_name, owner)
            setattr(cls, method, wrapped)
            self._methods[target] = functools.partial(setattr, cls, method, original)
        else:
            rebind([(original, wrapped)])
            self._functions[target] = original, wrapped

    def replace(
        self, pairs: Iterable[tuple[Callable[..., Any], Callable[..., Any]]], *, then: Callable[[], None]
    ) -> None:
        """Replace each first function of ``pairs`` by the second, wherever it is bound by name.

        Args:
            pairs: originals and replacements.
            then: called now, and again when the originals are restored.
        """
        pairs = list(pairs)
        rebind(pairs)
        self._functions |= {f"{original.__module__}.{original.__name__}": (original, new) for original, new in pairs}
        then()
        self._after_undo.append(then)

    def undo(self) -> None:
        """Restore the originals; do nothing where nothing is replaced."""
        if self._functions:
            rebind((new, original) for original, new in self._functions.values())
        for restore in (*self._methods.values(), *self._after_undo):
            restore()
        self.__init__()

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted names of the wrapped and replaced functions."""
        return (*self._methods, *self._functions)
