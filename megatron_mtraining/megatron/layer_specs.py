"""Megatron's own layer specs with this attention in the place of theirs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from ..errors import invalid
from .compat import require_symbol, transformer_engine_attention
from .core_attention import MTrainingCoreAttention

_GPT_SPECS = "megatron.core.models.gpt.gpt_layer_specs"


class ReplacedSpec(NamedTuple):
    """A layer spec and what became of the attentions in it."""

    spec: Any

    num_replaced: int
    """Number of attentions that attend sparsely now."""

    kept: tuple[str, ...]
    """Attentions that keep their own: modules and masks."""


def get_mtraining_layer_local_spec(**options: Any) -> Any:
    """Return ``get_gpt_layer_local_spec(**options)`` with this attention."""
    return replace_core_attention(require_symbol(_GPT_SPECS, "get_gpt_layer_local_spec")(**options)).spec


def get_mtraining_layer_with_transformer_engine_spec(**options: Any) -> Any:
    """Return ``get_gpt_layer_with_transformer_engine_spec(**options)`` with this attention."""
    build = require_symbol(_GPT_SPECS, "get_gpt_layer_with_transformer_engine_spec")
    return replace_core_attention(build(**options)).spec


def replace_core_attention(spec: Any) -> ReplacedSpec:
    """Put this attention under every causal self attention of a layer, block or model spec.

    Cross attention and self attention under another mask keep what they have. Over several ranks that is right in
    Megatron's own zigzag split only, so the sparse attentions carry the names of those kept and refuse, when a model is
    built of the spec, a layout that they would compute a wrong mask on. A model cannot be built before
    :func:`megatron_mtraining.megatron.initialize`, so that check knows the layout, whichever came first.

    Args:
        spec: a tree of ModuleSpec, submodules dataclasses, partials and sequences. It is left as it was.

    Returns:
        A copy that shares what did not change, the number of layers in it that attend sparsely now, and the rest.

    Raises:
        ValueError: nothing to replace, or multi-latent attention alone.
    """
    replaced, kept, latent = [], [], []

    def survey(submodules: Any, owner: _Owner) -> Any:
        found = latent if _is_latent(submodules) else replaced if _is_replaceable(submodules, owner) else kept
        found.append(str(owner))
        return submodules

    _rewrite(spec, survey)
    if latent and not replaced:
        raise invalid("multi_latent_attention", "False", True, "Use Megatron's own core attention for this model.")
    if not replaced:
        raise invalid(
            "spec",
            "one with a causal self attention",
            type(spec).__name__,
            "Pass a layer or block spec whose self_attention has attn_mask_type=causal.",
        )

    def replace(submodules: Any, owner: _Owner) -> Any:
        return _with_sparse_attention(submodules, tuple(kept)) if _is_replaceable(submodules, owner) else submodules

    return ReplacedSpec(_rewrite(spec, replace), len(replaced), tuple(kept))


class _Owner(NamedTuple):
    """Module whose submodules are looked at."""

    module: str = "attention"
    mask: AttnMaskType | None = None

    def __str__(self) -> str:
        return f"{self.module} with attn_mask_type={self.mask and self.mask.name}"

    @classmethod
    def of(cls, module: Any, params: dict[str, Any] | None) -> _Owner:
        """Return the owner that a ModuleSpec or a partial describes."""
        return cls(getattr(module, "__name__", str(module)), (params or {}).get("attn_mask_type"))


_UNKNOWN = _Owner()
_Visit = Callable[[Any, _Owner], Any]


def _rewrite(node: Any, visit: _Visit, owner: _Owner = _UNKNOWN) -> Any:
    """Return ``node`` with attention submodules as ``visit`` returns them; ``node`` itself if they are the same."""
    if isinstance(node, functools.partial):
        changed = _changed_items(node.keywords, visit, _Owner.of(node.func, node.keywords))
        return functools.partial(node.func, *node.args, **(node.keywords | changed)) if changed else node
    if isinstance(node, (list, tuple)):
        items = [_rewrite(item, visit, owner) for item in node]
        return type(node)(items) if any(new is not old for new, old in zip(items, node, strict=True)) else node
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    if getattr(node, "core_attention", None) is not None:
        return visit(node, owner)
    if isinstance(node, ModuleSpec):
        owner = _Owner.of(node.module, node.params)
    changed = _changed_items(
        {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}, visit, owner
    )
    return _copy_with(node, changed) if changed else node


def _changed_items(items: dict[str, Any], visit: _Visit, owner: _Owner) -> dict[str, Any]:
    rewritten = {name: _rewrite(value, visit, owner) for name, value in items.items()}
    return {name: value for name, value in rewritten.items() if value is not items[name]}


def _is_latent(submodules: Any) -> bool:
    """Return whether they are those of a multi-latent attention.

    The spec of a hybrid model lists one, for patterns that ask for it. Its configuration then says so and is refused.
    """
    return hasattr(submodules, "linear_kv_down_proj")


def _is_replaceable(submodules: Any, owner: _Owner) -> bool:
    return isinstance(submodules, SelfAttentionSubmodules) and owner.mask is AttnMaskType.causal


def _with_sparse_attention(submodules: SelfAttentionSubmodules, kept: tuple[str, ...]) -> SelfAttentionSubmodules:
    """Return the submodules with the attention that fits theirs: TransformerEngine's module for TransformerEngine's."""
    te_attention = transformer_engine_attention()
    original, module = submodules.core_attention, MTrainingCoreAttention
    original = original.module if isinstance(original, ModuleSpec) else original
    if te_attention is not None and isinstance(original, type) and issubclass(original, te_attention):
        module = importlib.import_module(f"{__package__}.te_core_attention").TEMTrainingCoreAttention
    sparse = ModuleSpec(module=module, params={"kept_attentions": kept}) if kept else module
    return _copy_with(submodules, {"core_attention": sparse})


def _copy_with(node: Any, changed: dict[str, Any]) -> Any:
    """Return a shallow copy with new field values, without running the dataclass's own initialisation again."""
    duplicate = copy.copy(node)
    for name, value in changed.items():
        setattr(duplicate, name, value)
    return duplicate
