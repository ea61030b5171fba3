"""Limits of this attention, refused in one sentence each before anything is computed."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from ..errors import invalid
from .compat import cuda_graphs_cover_attention


class Off(NamedTuple):
    """TransformerConfig option that must be off, i.e. None, False, zero or absent."""

    name: str
    value: str
    """Spelling of "off", for the sentence."""
    remedy: str


_DENSE = "Use Megatron's own core attention for this model."
ALWAYS_OFF = (
    Off("multi_latent_attention", "False", f"Keys and values of one head_dim are needed. {_DENSE}"),
    Off("experimental_attention_variant", "None", _DENSE),
    Off("fp8_dot_product_attention", "False", "Attention runs in the dtype of its inputs."),
    Off("fp8_multi_head_attention", "False", "Attention runs in the dtype of its inputs."),
    Off("qk_clip", "False", "The largest attention logit is not tracked."),
    Off("log_max_attention_logit", "False", "The largest attention logit is not tracked."),
    Off("batch_invariant_mode", "False", "It needs Megatron's flash attention."),
    Off("flash_decode", "False", "This is attention for training; decode with Megatron's own."),
    Off("hybrid_context_parallel", "False", "The context-parallel group must be the same for every sequence."),
    Off("dynamic_context_parallel", "False", "The context-parallel group must be the same for every sequence."),
    Off("mrope_section", "None", "Use rope or yarn positions."),
)
_ZIGZAG = "Use layout=zigzag, which is Megatron's own split."
OFF_UNLESS_ZIGZAG = (
    Off("mtp_hsm", "False", "Hidden states of earlier depths would be mixed across pieces of Megatron's split."),
)
GRAPHS = "Which keys are kept depends on the data, so attention cannot be captured."


SHARED_OVER_RANKS = "What the heads of a group keep would depend on which of them share a rank."


def check_index_sharing(config: Any, *, index_sharing: str) -> None:
    """Refuse lists of groups whose heads are on several ranks.

    Args:
        config: a model's TransformerConfig. What Megatron hands to a core attention will not do: where there are fewer
            key/value heads than ranks it is a copy that says otherwise.
        index_sharing: of the configuration of this attention.

    Raises:
        ValueError: naming both numbers.
    """
    ranks, groups = config.tensor_model_parallel_size, config.num_query_groups
    if index_sharing == "kv_group" and groups is not None and ranks > groups:
        rule = "head with more tensor-parallel ranks than key/value heads"
        raise invalid("index_sharing", rule, f"kv_group with {ranks} and {groups}", SHARED_OVER_RANKS)


def check_config(config: Any, *, layout: str, cp_size: int) -> None:
    """Refuse options of a TransformerConfig that would be ignored or computed wrongly.

    Raises:
        ValueError: naming the option and what to do.
    """
    if config.context_parallel_size != cp_size:
        raise invalid(
            "context_parallel_size",
            f"the size {cp_size} of the group that initialize() saw",
            config.context_parallel_size,
            "Call megatron_mtraining.megatron.initialize after initialize_model_parallel.",
        )
    relayed = cp_size > 1 and layout != "zigzag"
    for name, off, remedy in ALWAYS_OFF:
        if getattr(config, name, None):
            raise invalid(name, off, getattr(config, name), remedy)
    for name, off, remedy in OFF_UNLESS_ZIGZAG if relayed else ():
        if getattr(config, name, None):
            rule = f"{off} with layout={layout} on {cp_size} ranks"
            raise invalid(name, rule, getattr(config, name), f"{remedy} {_ZIGZAG}")
    if config.softmax_type != "vanilla":
        raise invalid("softmax_type", "'vanilla'", repr(config.softmax_type), "Learned sinks are not supported.")
    if cuda_graphs_cover_attention(config):
        raise invalid("cuda_graph_impl", "'none' or leave attention out", repr(config.cuda_graph_impl), GRAPHS)
    if getattr(config, "fine_grained_activation_offloading", False) and "core_attn" in (config.offload_modules or ()):
        raise invalid(
            "offload_modules", "without core_attn", config.offload_modules, "Use recompute_modules=core_attn."
        )


def check_kept(kept: tuple[str, ...], *, layout: str, cp_size: int) -> None:
    """Refuse a model in which attentions of Megatron's own stand beside sparse ones on a sequence cut otherwise.

    Args:
        kept: names of the attentions that :func:`megatron_mtraining.megatron.replace_core_attention` left alone.
        layout: which rank holds which block.
        cp_size: context-parallel ranks.

    Raises:
        ValueError: naming them and what to do.
    """
    if kept and cp_size > 1 and layout != "zigzag":
        raise invalid(
            "spec",
            f"of causal self attentions only with layout={layout} on {cp_size} ranks",
            f"{', '.join(dict.fromkeys(kept))} beside them",
            f"{_ZIGZAG[:-1]}, or one context-parallel rank.",
        )


def check_layer(
    config: Any,
    *,
    layer_number: int,
    attn_mask_type: AttnMaskType,
    attention_type: str,
    attention_dropout: float | None,
) -> None:
    """Refuse what one layer asks of its attention.

    Raises:
        ValueError: naming the option and what to do.
    """
    if attention_type != "self":
        raise invalid("attention_type", "'self'", repr(attention_type), _DENSE)
    if attn_mask_type is not AttnMaskType.causal:
        raise invalid("attn_mask_type", "causal", attn_mask_type, _DENSE)
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    if dropout:
        raise invalid("attention_dropout", "0", dropout, "Pass --attention-dropout 0.")
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        raise invalid("window_size", f"None in layer {layer_number}", config.window_size, "Slashes replace the window.")


def check_call(
    *, attention_mask: Any, attn_mask_type: AttnMaskType | None, attention_bias: Any, extra: dict[str, Any]
) -> None:
    """Refuse arguments of a forward call that would be ignored.

    Raises:
        ValueError: naming the argument and what to do.
    """
    if attention_mask is not None:
        raise invalid(
            "attention_mask",
            "None",
            f"a tensor of shape {tuple(attention_mask.shape)}",
            "Attention is causal and separates documents by packed_seq_params; "
            "pass --no-create-attention-mask-in-dataloader.",
        )
    if attn_mask_type not in (None, AttnMaskType.causal):
        raise invalid(
            "attn_mask_type", "causal", attn_mask_type, "Decoding is not supported; use Megatron's attention."
        )
    if attention_bias is not None:
        raise invalid("attention_bias", "None", f"a tensor of shape {tuple(attention_bias.shape)}", _DENSE)
    check_extra(extra)


def check_extra(extra: dict[str, Any]) -> None:
    """Refuse keywords that only other core attentions know, unless they are None.

    Raises:
        ValueError: naming the keyword.
    """
    for name, value in extra.items():
        if value is not None:
            raise invalid(name, "None", type(value).__name__, _DENSE)
