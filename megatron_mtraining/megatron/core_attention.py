"""Sparse ring attention as Megatron's ``core_attention``."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ..attention import attend
from ..config import MTrainingConfig
from ..errors import invalid
from ..layout import SequenceLayout
from ..request import AttentionRequest
from ..transport import as_transport
from ..types import AttentionIndex
from .micro_batch import current_padding
from .packing import check_packing, check_unpacked, documents_of
from .recorder import LayerRecord, current_observer
from .refusals import check_call, check_config, check_extra, check_kept, check_layer
from .runtime import Runtime, current_runtime

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


class SparseForward:
    """The forward pass, shared by the module for Megatron's own layers and the one for TransformerEngine's.

    It selects keys anew in every call, without random numbers, so that recomputation finds the same ones.
    """

    def prepare(
        self,
        config: Any,
        *,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None,
        softmax_scale: float | None,
        pg_collection: Any,
        kept_attentions: tuple[str, ...],
    ) -> None:
        """Check what Megatron's builder passes and keep what the forward pass needs.

        Raises:
            ValueError: an option that this attention does not do, or groups other than :func:`initialize` saw.
        """
        runtime = current_runtime()
        check_layer(
            config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
        )
        self.given_index: AttentionIndex | None = None
        """Index to attend with instead of one that is selected; the doctor hands one on to other ranks."""
        self._runtime = runtime
        self._cp_group = _context_parallel_group(pg_collection, runtime)
        check_config(
            config,
            layout=runtime.config.layout,
            cp_size=self._cp_group.size(),
        )
        check_kept(kept_attentions, layout=runtime.config.layout, cp_size=self._cp_group.size())
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
            attention_mask: None; causality and documents are known without one.
            attn_mask_type: causal or None.
            attention_bias: None.
            packed_seq_params: bounds of the documents over the whole pack, for packed input.
            extra: further keywords of other core attentions; all None.

        Returns:
            ``[local_len, batch, num_heads * head_dim]``, or packed ``[local_len, num_heads * head_dim]``.

        Raises:
            ValueError: an argument that would be ignored or a length that the layout does not divide.
        """
        check_call(
            attention_mask=attention_mask, attn_mask_type=attn_mask_type, attention_bias=attention_bias, extra=extra
        )
        packed = query.dim() == 3
        cu_seqlens = self._documents(packed_seq_params, local_len=query.shape[0], packed=packed)
        batch_first = tuple(tensor[None] if packed else tensor.transpose(0, 1) for tensor in (query, key, value))
        out = self._attend(*batch_first, cu_seqlens, self._num_valid(batch_first[0], cu_seqlens))
        return out[0].flatten(1) if packed else out.transpose(0, 1).flatten(2)

    def _documents(self, params: PackedSeqParams | None, *, local_len: int, packed: bool) -> Tensor | None:
        if not packed:
            check_unpacked(params)
            return None
        cp_size = self._cp_group.size()
        cu_seqlens = documents_of(params, seq_len=local_len * cp_size)
        check_packing(params, layout=self._runtime.config.layout, cp_size=cp_size, fuses_rope=self._fuses_rope)
        return cu_seqlens

    def _num_valid(self, query: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
        """Return the tokens before the padding of every batch row or document; None where there is no padding."""
        padding = current_padding()
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
            layout=_layout(runtime.config, query.shape[1] * cp_size, cp_size, runtime.inner_size),
            groups=runtime.ring_groups,
            softmax_scale=self._softmax_scale,
            **text,
            on_index=partial(self._record, text=text),
        ).out

    def _record(self, request: AttentionRequest, index: AttentionIndex, text: dict[str, Tensor | None]) -> None:
        recorder, observer = self._runtime.recorder, current_observer()
        if recorder is None and observer is None:
            return
        call = LayerRecord(
            index=index,
            layout=request.layout,
            softmax_scale=request.softmax_scale,
            **text,
            query=request.query.detach(),
            key=request.key.detach(),
        )
        if observer is not None:
            observer.observe(self._layer_number, call)
        if recorder is not None:
            kept = call if recorder.capture_query_key else dataclasses.replace(call, query=None, key=None)
            recorder.layers[self._layer_number] = kept


class MTrainingCoreAttention(SparseForward, MegatronModule):
    """The ``core_attention`` for layer specs of Megatron's own modules. It has no parameters and no state.

    Takes what Megatron's builder passes: ``config, layer_number, attn_mask_type, attention_type, attention_dropout,
    softmax_scale, cp_comm_type, pg_collection``. ``cp_comm_type`` says how TransformerEngine would communicate and is
    not used. ``kept_attentions`` comes with a spec of :func:`replace_core_attention` that leaves others as they are.
    One context-parallel rank attends sparsely too.

    Raises:
        ValueError: an option that this attention does not do, in one sentence that names it and what to do.
        RuntimeError: :func:`megatron_mtraining.megatron.initialize` was not called.
    """

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
        kept_attentions: tuple[str, ...] = (),
        **extra: Any,
    ) -> None:
        super().__init__(config=config)
        check_extra(extra)
        self.prepare(
            config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
            kept_attentions=kept_attentions,
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return nothing, as Megatron's own core attention does for a plain softmax."""
        return {}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A checkpoint of a TransformerEngine model holds an fp8 state here that strict loading would call unexpected.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@lru_cache(maxsize=64)
def _layout(config: MTrainingConfig, seq_len: int, cp_size: int, node_size: int) -> SequenceLayout:
    sizes = {"seq_len": seq_len, "cp_size": cp_size, "block_size": config.block_size, "node_size": node_size}
    return SequenceLayout(config.layout, **sizes)


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
