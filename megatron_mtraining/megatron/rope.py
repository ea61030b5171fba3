"""Rotary position embeddings of the tokens that a rank has.

Megatron cuts its table of rotary angles by its own zigzag split, for whole sequences and for packed documents.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..tensors import to_device
from .compat import require_symbol
from .split import Pair, TokenSplit

_EMBEDDINGS = "megatron.core.models.common.embeddings"


def rope_replacements(split: TokenSplit) -> list[Pair]:
    """Return Megatron's functions that cut rotary tables, each with its replacement.

    Raises:
        MissingSymbolError: this Megatron-Core has no such function.
    """
    utils = f"{_EMBEDDINGS}.rope_utils"
    cut = require_symbol(utils, "get_pos_emb_on_this_cp_rank", parameters=("pos_emb", "seq_dim", "cp_group"))
    rotate_packed = require_symbol(
        utils, "_apply_rotary_pos_emb_thd", parameters=("t", "cu_seqlens", "freqs", "cp_group")
    )
    rotate = require_symbol(utils, "_apply_rotary_pos_emb_bshd", parameters=("t", "freqs"))
    accepted = inspect.signature(rotate).parameters

    def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        """Return the rows of ``pos_emb`` (``seq_len`` along ``seq_dim``) that belong to this rank's tokens."""
        return pos_emb.index_select(seq_dim, split.positions(pos_emb.shape[seq_dim], cp_group, pos_emb.device))

    def _apply_rotary_pos_emb_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_group: Any, **options: Any
    ) -> Tensor:
        """Rotate packed tokens ``[local_tokens, heads, head_dim]`` by their positions within their documents."""
        if cp_group.size() == 1:
            return rotate_packed(t, cu_seqlens, freqs, cp_group=cp_group, **options)
        seq_len, max_seqlen = t.shape[0] * cp_group.size(), options.get("max_seqlen")
        rows = split.positions(seq_len, cp_group, freqs.device)
        # Megatron's rules for a table that covers the whole pack, where positions continue across documents: later
        # releases compare it with the longest document, earlier ones with the length of the pack.
        covers_pack = freqs.shape[0] == seq_len if max_seqlen is None else freqs.shape[0] > max_seqlen
        if not covers_pack:
            # The padding after a document may lie beyond the table; its rotation is never used.
            rows = positions_in_documents(rows, cu_seqlens).clamp(max=freqs.shape[0] - 1)
        options = {name: value for name, value in options.items() if name in accepted}
        return rotate(t.unsqueeze(1), freqs.index_select(0, rows), **options).squeeze(1)

    return [(cut, get_pos_emb_on_this_cp_rank), (rotate_packed, _apply_rotary_pos_emb_thd)]


def clear_rotary_tables() -> None:
    """Empty the caches of rotary tables, which functions replaced since have cut."""
    for module, name in (
        ("rotary_pos_embedding", "RotaryEmbedding"),
        ("yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
    ):
        cache_clear = getattr(require_symbol(f"{_EMBEDDINGS}.{module}", name).forward, "cache_clear", None)
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
