"""Sparse ring attention as Megatron's ``core_attention``, and Megatron's layer specs with it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from ..attention import attend
from ..errors import invalid
from ..request import AttentionRequest
from ..transport import as_transport
from ..types import AttentionIndex
from .compat import require_symbol, transformer_engine_attention
from .documents import documents_of
from .runtime import LayerRecord, Runtime, current_runtime, process
from .unsupported import CALL, LAYER, MODEL, PACK, check, check_extra

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

_TE_ATTENTION = transformer_engine_attention()


class SparseForward:
    """Constructor and forward pass, shared by the module for Megatron's own layers and that for TransformerEngine's.

    Every call selects keys anew, without random numbers, so that recomputation finds the same ones.
    """

    _MODULE_ARGUMENTS: tuple[str, ...] = ("config",)
    """Arguments that the module's own constructor takes."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        others: tuple[str, ...] = (),
        **extra: Any,
    ) -> None:
        given = {
            "config": config,
            "layer_number": layer_number,
            "attn_mask_type": attn_mask_type,
            "attention_type": attention_type,
            "attention_dropout": attention_dropout,
        }
        check_extra(extra)
        of_module = given | {"softmax_scale": softmax_scale, "cp_comm_type": "p2p", "pg_collection": pg_collection}
        super().__init__(**{name: of_module[name] for name in self._MODULE_ARGUMENTS})
        runtime = current_runtime()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        check(LAYER, **(given | {"given": config, "attention_dropout": dropout}))
        self.given_index: AttentionIndex | None = None
        """Index to attend with instead of one that is selected; the doctor passes one on to other ranks."""
        self._runtime = runtime
        self._cp_group = _context_parallel_group(pg_collection, runtime)
        check(MODEL, given=config, layout=runtime.config.layout, cp_size=self._cp_group.size(), others=others)
        self._layer_number = layer_number
        # apply_query_key_layer_scaling divides scores by the layer number before the softmax and multiplies them by it
        # inside: a guard against fp16 overflow that leaves the scale as it is. Scores are float32 here.
        self._softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._fuses_rope = config.apply_rope_fusion

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **extra: Any,
    ) -> Tensor:
        """Attend from this rank's tokens to the whole sequence.

        Args:
            query: ``[local_len, batch, num_heads, head_dim]``, or packed ``[local_len, num_heads, head_dim]``.
            key: as ``query`` with ``num_kv_heads``.
            value: as ``key``.
            attention_mask: None; attention is causal and separates documents without one.
            attn_mask_type: causal or None.
            attention_bias: None.
            packed_seq_params: bounds of the documents over the whole pack, for packed input.
            extra: further keywords of other core attentions; all None.

        Returns:
            ``[local_len, batch, num_heads * head_dim]``, or packed ``[local_len, num_heads * head_dim]``.

        Raises:
            ValueError: an argument that would be ignored or a length that the layout does not divide.
        """
        packed = query.dim() == 3
        check(
            CALL,
            given=packed_seq_params,
            is_packed=packed,
            attention_mask=attention_mask,
            attn_mask_type=attn_mask_type,
            attention_bias=attention_bias,
        )
        check_extra(extra)
        cu_seqlens = self._documents(packed_seq_params, local_len=query.shape[0]) if packed else None
        batch_first = tuple(tensor[None] if packed else tensor.transpose(0, 1) for tensor in (query, key, value))
        out = self._attend(*batch_first, cu_seqlens, self._num_valid(batch_first[0], cu_seqlens))
        return out[0].flatten(1) if packed else out.transpose(0, 1).flatten(2)

    def _documents(self, params: PackedSeqParams | None, *, local_len: int) -> Tensor:
        cp_size = self._cp_group.size()
        cu_seqlens = documents_of(params, seq_len=local_len * cp_size)
        layout = self._runtime.config.layout
        check(PACK, given=params, layout=layout, cp_size=cp_size, apply_rope_fusion=self._fuses_rope)
        return cu_seqlens

    def _num_valid(self, query: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
        """Return the tokens before the padding of every batch row or document; None where there is no padding."""
        padding = process().micro_batches.current_padding()
        if padding is None:
            return None
        return padding.num_valid(cu_seqlens, rows=query.shape[0], seq_len=query.shape[1] * self._cp_group.size())

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, num_valid: Tensor | None
    ) -> Tensor:
        runtime, cp_size = self._runtime, self._cp_group.size()
        text = {"cu_seqlens": cu_seqlens, "num_valid": num_valid}
        return attend(
            query,
            key,
            value,
            runtime.config_of(self._layer_number),
            index=self.given_index,
            layout=runtime.split.sequence(query.shape[1] * cp_size, cp_size),
            groups=runtime.ring_groups,
            softmax_scale=self._softmax_scale,
            **text,
            on_index=functools.partial(self._record, text=text),
        ).out

    def _record(self, request: AttentionRequest, index: AttentionIndex, text: dict[str, Tensor | None]) -> None:
        observers = process().observers
        if not observers:
            return
        call = LayerRecord(
            index=index,
            layout=request.layout,
            softmax_scale=request.softmax_scale,
            **text,
            query=request.query.detach(),
            key=request.key.detach(),
        )
        for observer in observers:
            observer.observe(self._layer_number, call)


class MTrainingCoreAttention(SparseForward, MegatronModule):
    """The ``core_attention`` for layer specs of Megatron's own modules. It has no parameters and no state.

    It takes what Megatron's builder passes: ``config, layer_number, attn_mask_type, attention_type, attention_dropout,
    softmax_scale, cp_comm_type, pg_collection``. ``cp_comm_type``, which is for TransformerEngine, is not used.
    ``others`` comes from :func:`replace_core_attention`: the attentions of the model that are not replaced. One
    context-parallel rank attends sparsely too.

    Raises:
        ValueError: an unsupported option, in one sentence that names it and what to do.
        RuntimeError: :func:`megatron_mtraining.megatron.initialize` was not called.
    """

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return nothing, as Megatron's own core attention does for a plain softmax."""
        return {}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A checkpoint of a TransformerEngine model holds an fp8 state here that strict loading would call unexpected.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


if _TE_ATTENTION is not None:

    class TEMTrainingCoreAttention(SparseForward, _TE_ATTENTION):
        """Megatron's TransformerEngine attention with another forward pass, for specs of TransformerEngine's modules.

        It remains TransformerEngine's module, so that checkpoints have the same content (``_extra_state``) and its
        attributes are there. TransformerEngine's own context parallelism, which assumes the zigzag split, never runs.
        """

        _MODULE_ARGUMENTS = (
            "config",
            "layer_number",
            "attn_mask_type",
            "attention_type",
            "attention_dropout",
            "softmax_scale",
            "cp_comm_type",
            "pg_collection",
        )


def _context_parallel_group(pg_collection: Any, runtime: Runtime) -> Any:
    """Return the group that Megatron passes in, which must be of the ranks that the ring's groups were made for."""
    given = getattr(pg_collection, "cp", None)
    if given is None:
        return runtime.cp_group
    ranks, expected = (as_transport(group).global_ranks for group in (given, runtime.cp_group))
    if ranks != expected:
        raise invalid(
            "pg_collection.cp",
            f"the context-parallel group of ranks {expected}, which initialize() saw",
            ranks,
            "Build the model with the groups of Megatron's parallel_state.",
        )
    return given


_GPT_SPECS = "megatron.core.models.gpt.gpt_layer_specs"


class ReplacedSpec(NamedTuple):
    """A layer spec, with the number of attentions that are sparse in it and the names of the others."""

    spec: Any

    num_replaced: int
    """Number of attentions that attend sparsely now."""

    others: tuple[str, ...]
    """Attentions that are not replaced: modules and masks."""


def get_mtraining_layer_local_spec(**options: Any) -> Any:
    """Return ``get_gpt_layer_local_spec(**options)`` with this attention."""
    return replace_core_attention(require_symbol(_GPT_SPECS, "get_gpt_layer_local_spec")(**options)).spec


def get_mtraining_layer_with_transformer_engine_spec(**options: Any) -> Any:
    """Return ``get_gpt_layer_with_transformer_engine_spec(**options)`` with this attention."""
    build = require_symbol(_GPT_SPECS, "get_gpt_layer_with_transformer_engine_spec")
    return replace_core_attention(build(**options)).spec


def replace_core_attention(spec: Any) -> ReplacedSpec:
    """Put this attention under every causal self attention of a layer, block or model spec.

    Cross attention and self attention under another mask are not replaced. Over several ranks they are right in
    Megatron's own zigzag split only. So the sparse attentions get the names of the others and raise an error, when a
    model is built of the spec, under a layout for which the others would compute a wrong mask.

    Args:
        spec: a tree of ModuleSpec, submodules dataclasses, partials and sequences. It is left as it was.

    Returns:
        A copy that shares what did not change, the number of its layers that attend sparsely, and the others.

    Raises:
        ValueError: nothing to replace, or multi-latent attention alone.
    """
    replaced, others, latent = [], [], []

    def survey(submodules: Any, owner: _Owner) -> Any:
        found = latent if _is_latent(submodules) else replaced if _is_replaceable(submodules, owner) else others
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
        return _with_sparse_attention(submodules, tuple(others)) if _is_replaceable(submodules, owner) else submodules

    return ReplacedSpec(_rewrite(spec, replace), len(replaced), tuple(others))


class _Owner(NamedTuple):
    """Module whose submodules are visited."""

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

    The spec of a hybrid model lists one, for patterns that ask for it; their configuration is unsupported.
    """
    return hasattr(submodules, "linear_kv_down_proj")


def _is_replaceable(submodules: Any, owner: _Owner) -> bool:
    return isinstance(submodules, SelfAttentionSubmodules) and owner.mask is AttnMaskType.causal


def _with_sparse_attention(submodules: SelfAttentionSubmodules, others: tuple[str, ...]) -> SelfAttentionSubmodules:
    """Return the submodules with the attention that fits theirs: TransformerEngine's module for TransformerEngine's."""
    original, module = submodules.core_attention, MTrainingCoreAttention
    original = original.module if isinstance(original, ModuleSpec) else original
    if _TE_ATTENTION is not None and isinstance(original, type) and issubclass(original, _TE_ATTENTION):
        module = TEMTrainingCoreAttention
    sparse = ModuleSpec(module=module, params={"others": others}) if others else module
    return _copy_with(submodules, {"core_attention": sparse})


def _copy_with(node: Any, changed: dict[str, Any]) -> Any:
    """Return a shallow copy with new field values, without running the dataclass's own initialisation again."""
    duplicate = copy.copy(node)
    for name, value in changed.items():
        setattr(duplicate, name, value)
    return duplicate
