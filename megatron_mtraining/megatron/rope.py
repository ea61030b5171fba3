"""Rotary position embeddings of the tokens that a rank really holds.

Megatron cuts its table of rotary angles by its own zigzag split, for whole sequences and for packed documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors import to_device
from .compat import require_symbol
from .token_split import TokenSplit

_ROPE_UTILS = "megatron.core.models.common.embeddings.rope_utils"
_EMBEDDINGS = (
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding"),
    ("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
)


def replacements(split: TokenSplit) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return Megatron's functions that cut rotary tables, each with the one that cuts them by ``split``.

    Raises:
        MissingSymbolError: this Megatron-Core has no such function.
    """
    slice_table = require_symbol(
        _ROPE_UTILS, "get_pos_emb_on_this_cp_rank", parameters=("pos_emb", "seq_dim", "cp_group")
    )
    apply_packed = require_symbol(
        _ROPE_UTILS, "_apply_rotary_pos_emb_thd", parameters=("t", "cu_seqlens", "freqs", "cp_group")
    )
    apply_rotation = require_symbol(_ROPE_UTILS, "_apply_rotary_pos_emb_bshd", parameters=("t", "freqs"))
    return [
        (slice_table, _slice_table(split)),
        (apply_packed, _apply_packed(split, apply_packed, apply_rotation)),
    ]


def forget_tables() -> None:
    """Empty the caches of rotary tables that were cut by functions since replaced."""
    for module_name, name in _EMBEDDINGS:
        cache_clear = getattr(require_symbol(module_name, name).forward, "cache_clear", None)
        if cache_clear is not None:
            cache_clear()


def positions_in_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return int64, shaped as ``positions``: each global position counted from the start of its document."""
    on_host = cu_seqlens.device.type == "cpu"
    bounds = to_device(cu_seqlens, positions.device) if on_host else cu_seqlens.to(positions.device)
    bounds = bounds.to(positions.dtype)
    # right=True with empty documents: the last of several equal bounds is the start of the one that has tokens.
    document = torch.searchsorted(bounds, positions, right=True) - 1
    return positions - bounds[document]


def _slice_table(split: TokenSplit) -> Callable[..., Tensor]:
    def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        """Return the rows of ``pos_emb`` (``seq_len`` along ``seq_dim``) that belong to this rank's tokens."""
        return pos_emb.index_select(seq_dim, split.positions(pos_emb.shape[seq_dim], cp_group, pos_emb.device))

    return get_pos_emb_on_this_cp_rank


def _apply_packed(
    split: TokenSplit, original: Callable[..., Tensor], apply_rotation: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    accepted = inspect.signature(apply_rotation).parameters

    def _apply_rotary_pos_emb_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_group: Any, **options: Any
    ) -> Tensor:
        """Rotate packed tokens ``[local_tokens, heads, head_dim]`` by their positions within their documents."""
        if cp_group.size() == 1:
            return original(t, cu_seqlens, freqs, cp_group=cp_group, **options)
        positions = split.positions(t.shape[0] * cp_group.size(), cp_group, freqs.device)
        rows = positions
        if not _has_an_angle_per_token(freqs.shape[0], t.shape[0] * cp_group.size(), options.get("max_seqlen")):
            # The padding after a document may lie beyond the table; nobody reads what it is rotated by.
            rows = positions_in_documents(positions, cu_seqlens).clamp(max=freqs.shape[0] - 1)
        options = {name: value for name, value in options.items() if name in accepted}
        return apply_rotation(t.unsqueeze(1), freqs.index_select(0, rows), **options).squeeze(1)

    return _apply_rotary_pos_emb_thd


def _has_an_angle_per_token(table_len: int, seq_len: int, max_seqlen: int | None) -> bool:
    """Return whether a table covers the whole pack, so that positions go on across documents: Megatron's rules.

    Later releases tell by the longest document, earlier ones by the length of the pack.
    """
    return table_len == seq_len if max_seqlen is None else table_len > max_seqlen
