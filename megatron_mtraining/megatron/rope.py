"""Rotary position embeddings of the tokens that a rank really holds.

Megatron cuts its table of rotary angles by its own zigzag split, in two functions that other modules import by name.
:func:`install` puts the project's layout in their place wherever they are bound; :func:`uninstall` puts them back.
The function that cuts the batch is bound to a refusal meanwhile: tokens in one order under angles of another would
train on a wrong mask without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import invalid
from ..layout import SequenceLayout, token_positions
from ..tensors import to_device
from .compat import require_symbol
from .patching import rebind

_ROPE_UTILS = "megatron.core.models.common.embeddings.rope_utils"
_EMBEDDINGS = (
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding"),
    ("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
)


class _Installed:
    """The one installation of this process: what is bound in Megatron and what was."""

    layout: tuple[str, int] | None = None
    originals: list[tuple[Callable[..., Any], Callable[..., Any]]] = []


def install(*, layout: str, block_size: int) -> None:
    """Makes Megatron cut rotary tables by ``layout``; the same call again changes nothing.

    ``zigzag`` keeps Megatron's functions, which are right for it.

    Args:
        layout: a kind of :class:`megatron_mtraining.SequenceLayout`.
        block_size: tokens in a block.

    Raises:
        ValueError: another layout is installed.
        MissingSymbolError: this Megatron-Core has no such function.
    """
    if layout == "zigzag" or _Installed.layout == (layout, block_size):
        return
    if _Installed.layout is not None:
        raise invalid(
            "layout", f"the installed {_Installed.layout}", (layout, block_size), "Call destroy() before another one."
        )
    slice_table = require_symbol(
        _ROPE_UTILS, "get_pos_emb_on_this_cp_rank", parameters=("pos_emb", "seq_dim", "cp_group")
    )
    apply_packed = require_symbol(
        _ROPE_UTILS, "_apply_rotary_pos_emb_thd", parameters=("t", "cu_seqlens", "freqs", "cp_group")
    )
    apply_rotation = require_symbol(_ROPE_UTILS, "_apply_rotary_pos_emb_bshd", parameters=("t", "freqs"))
    split_batch = require_symbol("megatron.core.utils", "get_batch_on_this_cp_rank")
    replacements = (
        (slice_table, _slice_table(layout, block_size)),
        (apply_packed, _apply_packed(layout, block_size, apply_packed, apply_rotation)),
        (split_batch, _refusing_split(layout)),
    )
    _Installed.layout = (layout, block_size)
    for original, replacement in replacements:
        rebind(original, replacement)
        _Installed.originals.append((original, replacement))
    _forget_tables()


def uninstall() -> None:
    """Binds Megatron's own functions again; does nothing where nothing is installed."""
    while _Installed.originals:
        original, replacement = _Installed.originals.pop()
        rebind(replacement, original)
    _Installed.layout = None
    _forget_tables()


def _slice_table(layout: str, block_size: int) -> Callable[..., Tensor]:
    def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        """The rows of ``pos_emb`` (``seq_len`` along ``seq_dim``) that belong to this rank's tokens."""
        rows = _rows_of(cp_group, layout, block_size, pos_emb.shape[seq_dim], pos_emb.device)
        return pos_emb.index_select(seq_dim, rows)

    return get_pos_emb_on_this_cp_rank


def _refusing_split(layout: str) -> Callable[..., Any]:
    def get_batch_on_this_cp_rank(*arguments: Any, **options: Any) -> Any:
        """Refuses to cut a batch by zigzag while the layout is another one."""
        raise invalid(
            "layout", "zigzag for Megatron's own batch split", layout, "Call megatron_mtraining.megatron.shard_batch."
        )

    return get_batch_on_this_cp_rank


def _apply_packed(
    layout: str, block_size: int, original: Callable[..., Tensor], apply_rotation: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    accepted = inspect.signature(apply_rotation).parameters

    def _apply_rotary_pos_emb_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_group: Any, **options: Any
    ) -> Tensor:
        """Rotates packed tokens ``[local_tokens, heads, head_dim]`` by their positions within their documents."""
        if cp_group.size() == 1:
            return original(t, cu_seqlens, freqs, cp_group=cp_group, **options)
        seq_len = t.shape[0] * cp_group.size()
        positions = _rows_of(cp_group, layout, block_size, seq_len, freqs.device)
        # A table as long as the pack holds an angle for every token of it (Megatron's rule); else documents restart.
        rows = positions if freqs.shape[0] == seq_len else positions_in_documents(positions, cu_seqlens)
        options = {name: value for name, value in options.items() if name in accepted}
        return apply_rotation(t.unsqueeze(1), freqs.index_select(0, rows), **options).squeeze(1)

    return _apply_rotary_pos_emb_thd


def positions_in_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64, shaped as ``positions``: each global position counted from the start of its document."""
    on_host = cu_seqlens.device.type == "cpu"
    bounds = to_device(cu_seqlens, positions.device) if on_host else cu_seqlens.to(positions.device)
    bounds = bounds.to(positions.dtype)
    # right=True with empty documents: the last of several equal bounds is the start of the one that has tokens.
    document = torch.searchsorted(bounds, positions, right=True) - 1
    return positions - bounds[document]


def _rows_of(cp_group: Any, layout: str, block_size: int, table_len: int, device: torch.device) -> Tensor:
    return _local_positions(layout, block_size, table_len, cp_group.size(), cp_group.rank(), device)


@lru_cache(maxsize=16)  # every layer of a packed batch asks twice, for queries and for keys
def _local_positions(
    layout: str, block_size: int, table_len: int, cp_size: int, cp_rank: int, device: torch.device
) -> Tensor:
    """int64, on ``device``: the rows of a table of ``table_len`` positions that belong to this rank's tokens.

    YaRN also cuts a table of its original context length when it is built, which the layout need not divide; that table
    is cut as if it went on. Sequences of such a length are refused by the attention.
    """
    multiple = SequenceLayout.required_multiple(layout, cp_size=cp_size, block_size=block_size)
    seq_len = -(-table_len // multiple) * multiple
    sequence = SequenceLayout(layout, seq_len=seq_len, cp_size=cp_size, block_size=block_size)
    positions = token_positions(sequence, cp_rank=cp_rank)
    return to_device(positions[positions < table_len], device)


def _forget_tables() -> None:
    """Empties the caches of rotary tables that were cut by the functions just replaced."""
    _local_positions.cache_clear()
    for module_name, name in _EMBEDDINGS:
        cache_clear = getattr(require_symbol(module_name, name).forward, "cache_clear", None)
        if cache_clear is not None:
            cache_clear()
