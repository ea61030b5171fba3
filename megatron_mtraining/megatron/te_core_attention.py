"""The same attention for layer specs of TransformerEngine's modules; imported only where that is installed."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from .core_attention import SparseForward
from .refusals import check_extra


class TEMTrainingCoreAttention(SparseForward, TEDotProductAttention):
    """Megatron's TransformerEngine attention with another forward pass.

    It stays TransformerEngine's module so that checkpoints hold what they held (``_extra_state``) and whatever asks for
    its attributes finds them. TransformerEngine's own context parallelism, which assumes the zigzag split, never runs.

    Raises:
        ValueError: an option that this attention does not do.
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
        check_extra(extra)
        super().__init__(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            cp_comm_type="p2p",
            pg_collection=pg_collection,
        )
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
