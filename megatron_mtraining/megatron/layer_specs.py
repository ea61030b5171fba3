"""Megatron's own layer specs with this attention in the place of theirs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules

from ..errors import invalid
from .compat import require_symbol, transformer_engine_attention
from .core_attention import MTrainingCoreAttention

_GPT_SPECS = "megatron.core.models.gpt.gpt_layer_specs"


class ReplacedSpec(NamedTuple):
    """A layer spec and how many attentions in it were replaced."""

    spec: Any
    num_replaced: int


def get_mtraining_layer_local_spec(**options: Any) -> Any:
    """``get_gpt_layer_local_spec(**options)`` with this attention."""
    return replace_core_attention(require_symbol(_GPT_SPECS, "get_gpt_layer_local_spec")(**options)).spec


def get_mtraining_layer_with_transformer_engine_spec(**options: Any) -> Any:
    """``get_gpt_layer_with_transformer_engine_spec(**options)`` with this attention."""
    build = require_symbol(_GPT_SPECS, "get_gpt_layer_with_transformer_engine_spec")
    return replace_core_attention(build(**options)).spec


def replace_core_attention(spec: Any) -> ReplacedSpec:
    """Puts this attention under every causal self attention of a layer, block or model spec.

    Args:
        spec: a tree of ModuleSpec, submodules dataclasses, partials and sequences. It is left as it was.

    Returns:
        A copy that shares what did not change, and the number of layers in it that attend sparsely now. Cross attention
        and self attention under another mask keep what they have.

    Raises:
        ValueError: nothing to replace, or multi-latent attention.
    """
    replaced, count = _rewrite(spec, causal=False)
    if count == 0:
        raise invalid(
            "spec",
            "one with a causal self attention",
            type(spec).__name__,
            "Pass a layer or block spec whose self_attention has attn_mask_type=causal.",
        )
    return ReplacedSpec(replaced, count)


def _rewrite(node: Any, *, causal: bool) -> tuple[Any, int]:
    """``node`` with its attentions replaced, or ``node`` itself when there are none, and their number."""
    if isinstance(node, MLASelfAttentionSubmodules):
        raise invalid("multi_latent_attention", "False", True, "Use Megatron's own core attention for this model.")
    if isinstance(node, SelfAttentionSubmodules):
        return _with_sparse_attention(node) if causal and node.core_attention is not None else (node, 0)
    if isinstance(node, functools.partial):
        changed, count = _rewrite_items(node.keywords, causal=_is_causal(node.keywords))
        return (functools.partial(node.func, *node.args, **changed), count) if count else (node, 0)
    if isinstance(node, (list, tuple)):
        items, counts = zip(*(_rewrite(item, causal=causal) for item in node), strict=True) if node else ((), ())
        return (type(node)(items), sum(counts)) if sum(counts) else (node, 0)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        changed, count = _rewrite_items(fields, causal=_is_causal(fields.get("params") or {}))
        return (_copy_with(node, changed), count) if count else (node, 0)
    return node, 0


def _rewrite_items(items: dict[str, Any], *, causal: bool) -> tuple[dict[str, Any], int]:
    rewritten = {name: _rewrite(value, causal=causal) for name, value in items.items()}
    return {name: value for name, (value, _) in rewritten.items()}, sum(count for _, count in rewritten.values())


def _is_causal(params: dict[str, Any]) -> bool:
    return params.get("attn_mask_type") is AttnMaskType.causal


def _with_sparse_attention(submodules: SelfAttentionSubmodules) -> tuple[SelfAttentionSubmodules, int]:
    """The submodules with the attention that fits theirs: TransformerEngine's module for TransformerEngine's."""
    te_attention = transformer_engine_attention()
    original = submodules.core_attention
    if te_attention is not None and isinstance(original, type) and issubclass(original, te_attention):
        module = importlib.import_module(f"{__package__}.te_core_attention")
        return _copy_with(submodules, {"core_attention": module.TEMTrainingCoreAttention}), 1
    return _copy_with(submodules, {"core_attention": MTrainingCoreAttention}), 1


def _copy_with(node: Any, changed: dict[str, Any]) -> Any:
    """A shallow copy with new field values, without running the dataclass's own initialisation again."""
    duplicate = copy.copy(node)
    for name, value in changed.items():
        setattr(duplicate, name, value)
    return duplicate
