"""The function that transformers calls for each layer, and its registration under the name ``mtraining``."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, fields
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..attention import attend
from ..config import MTrainingConfig
from ..errors import InvalidError, check_type, invalid
from ..metrics import AttentionCall
from ..types import AttentionIndex
from .documents import Span, text_spans
from .observer import is_observed, report

_LOG = logging.getLogger(__name__)

NAME = "mtraining"
"""Name of this attention in transformers: ``attn_implementation="mtraining"``."""


def configure(model: nn.Module, config: MTrainingConfig) -> None:
    """Set the configuration of a model's attention; without it the defaults hold.

    Layers of ``config.dense_layers`` are counted from 1. The fields of layout, schedule and groups have no use on one
    device. ``model.save_pretrained`` writes the configuration into ``config.json``, which loads it again.

    Args:
        model: a transformers model; whichever attention implementation it uses now, this one is set.
        config: what is not at its default is kept in ``model.config.mtraining``.

    Raises:
        ValueError: ``config`` is no configuration, or has a field that needs a training loop.
    """
    check_type("config", config, MTrainingConfig, "an MTrainingConfig")
    changed = {
        field.name: value
        for field, value in zip(fields(config), asdict(config).values(), strict=True)
        if value != field.default
    }
    _config_of_entries(tuple(changed.items()))
    model.config.mtraining = {
        name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()
    }
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


@lru_cache(maxsize=64)
def _config_of_entries(entries: tuple[tuple[str, object], ...]) -> MTrainingConfig:
    config = MTrainingConfig(**dict(entries))
    if config.dense_warmup_steps:
        remedy = "Call hf.configure with pattern='dense' first, and again after those steps."
        raise InvalidError(f"unsupported: dense_warmup_steps with Hugging Face models, which count no steps. {remedy}")
    return config


def _config_of(module: nn.Module) -> MTrainingConfig:
    entries = getattr(module.config, "mtraining", None) or {}
    return _config_of_entries(
        tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in entries.items())
    )


def mtraining_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend, sparsely where queries and keys are the same tokens; the signature is that of transformers.

    As many queries as keys, without a mask or with one that holds padding or packed documents, is training or prefill:
    keys are selected, in each batch row as for its text alone. Fewer queries than keys is decoding, or a chunk of a
    prefill behind a cache: dense, by the mask of transformers. Layers with a window that hides keys, or with capped
    scores, attend as the model itself does. What is dense though it could be expected sparse is logged once. Every
    other mask raises.

    Args:
        module: attention layer with ``layer_idx`` from 0 and ``config``.
        query: ``[batch, num_heads, queries, head_dim]``.
        key: ``[batch, num_kv_heads, keys, head_dim]``.
        value: as ``key``.
        attention_mask: bool ``[batch, 1, queries, keys]``, or None where it is causal.
        scaling: factor of the scores.
        dropout: must be 0.
        is_causal: must not be False.
        **options: of other models, which must be None where they change attention.

    Returns:
        ``[batch, queries, num_heads, head_dim]``, and None for the weights.

    Raises:
        ValueError: the model asks for what is not supported.
    """
    _check_supported(module, dropout, is_causal, options)
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding may have promoted queries and keys
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    num_queries = query.shape[2]
    if attention_mask is None and 1 < num_queries < key.shape[2]:
        # An empty static cache, the one case of these in which transformers makes no mask: the rest is not yet written.
        key, value = key[:, :, :num_queries], value[:, :, :num_queries]
    own = _own_attention(module, query, key, value, attention_mask, scaling, options)
    if own is not None:
        return own, None
    config = _config_of(module)
    if num_queries != key.shape[2]:
        if num_queries > 1 and config.pattern != "dense":
            _log_once("chunks of a prefill behind a cache attend densely")
        return _dense(query, key, value, attention_mask, scaling), None
    layer = module.layer_idx + 1
    is_dense = config.pattern == "dense" or layer in config.dense_layers or num_queries <= config.dense_below
    if is_dense:
        _report_dense(layer, query, key, scaling)
        return _dense(query, key, value, attention_mask, scaling), None
    spans = None if attention_mask is None else text_spans(attention_mask, num_queries)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if spans is None:
        return _sparse(layer, query, key, value, config, scaling, None), None
    rows = [
        _texts_of_row(layer, query[i : i + 1], key[i : i + 1], value[i : i + 1], config, scaling, each)
        for i, each in enumerate(spans)
    ]
    return torch.cat(rows), None


def _texts_of_row(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig,
    scaling: float | None,
    spans: tuple[Span, ...],
) -> Tensor:
    """Attend in the texts of one batch row, whose blocks are counted from the first text on; 0 for padding."""
    if not spans:
        return torch.zeros_like(query)
    first, last = spans[0][0], spans[-1][1]
    bounds = sorted({bound - first for span in spans for bound in span})
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cpu") if len(spans) > 1 else None
    out = _sparse(layer, *(each[:, first:last] for each in (query, key, value)), config, scaling, cu_seqlens)
    return F.pad(out, (0, 0, 0, 0, first, query.shape[1] - last))


def _check_supported(module: nn.Module, dropout: float, is_causal: bool | None, options: dict[str, object]) -> None:
    given = [] if options.get("position_bias") is None else ["position_bias"]
    if dropout:
        given.append("attention_dropout")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        given.append("bidirectional attention")
    if given:
        remedy = "Use attn_implementation='sdpa' or 'eager' for this model."
        raise InvalidError(f"unsupported: attn_implementation={NAME!r} with {', '.join(given)}. {remedy}")


def _own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    options: dict[str, object],
) -> Tensor | None:
    """Attend as the model itself does where a window hides keys or scores are changed; None where neither is so."""
    changes = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    window = options.get("sliding_window")
    if changes:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            remedy = "Use attn_implementation='eager' for this model."
            raise InvalidError(f"unsupported: attn_implementation={NAME!r} with {', '.join(changes)}. {remedy}")
        _log_once(f"layers with {' and '.join(changes)} run the model's own attention")
        return eager(module, query, key, value, _additive(mask, query, key), scaling=scaling, **options)[0]
    if window is not None and key.shape[2] > window:
        _log_once("layers whose window hides keys run the model's own attention")
        return _dense(query, key, value, mask, scaling)
    return None


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask to add to scores; None where a query sees every key."""
    if mask is None:
        if query.shape[2] == 1:
            return None
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    least = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)  # a model's softmax may be in float32
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~_with_rows(mask), least)


def _with_rows(mask: Tensor) -> Tensor:
    """Return ``mask`` with every key for rows that see none, padding, whose softmax would be NaN."""
    return mask | ~mask.any(-1, keepdim=True)


@lru_cache(maxsize=64)
def _log_once(fact: str) -> None:
    _LOG.warning("attn_implementation=%r: %s.", NAME, fact)


def _sparse(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig,
    scaling: float | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Attend over selected keys; tensors are ``[batch, seq, heads, head_dim]``."""

    def on_index(_: object, index: AttentionIndex) -> None:
        report(AttentionCall(layer, query.detach(), key.detach(), index, scaling, cu_seqlens))

    return attend(
        query,
        key,
        value,
        config,
        index=None,
        layout=None,
        groups=None,
        softmax_scale=scaling,
        cu_seqlens=cu_seqlens,
        num_valid=None,
        on_index=on_index if is_observed() else None,
    ).out


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attend over every key before a query, or by the mask; tensors are ``[batch, heads, seq, head_dim]``."""
    causal = mask is None and query.shape[2] > 1
    if mask is not None and mask.dtype == torch.bool:
        mask = _with_rows(mask)
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1:  # only the slow kernel has groups and a mask
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2).contiguous()


def _report_dense(layer: int, query: Tensor, key: Tensor, scaling: float | None) -> None:
    if is_observed():
        query, key = query.detach().transpose(1, 2), key.detach().transpose(1, 2)
        report(AttentionCall(layer, query, key, None, scaling, None))


if NAME in AttentionInterface._global_mapping:
    raise invalid("attn_implementation", "registered once", NAME)
AttentionInterface.register(NAME, mtraining_attention)
# Without it transformers would pass no mask at all, and padding would be attended to.
AttentionMaskInterface.register(NAME, sdpa_mask)
