"""Order of the tokens of all ranks for layers that scan the sequence from left to right, and the way back.

Mamba and gated delta layers hold, between two all-to-alls, every token of the sequence for a part of their heads: rank
after rank, each in its own order. Megatron undoes its zigzag split there and redoes it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .compat import has_module, require_symbol
from .token_split import TokenSplit

_MAMBA = "megatron.core.ssm.mamba_context_parallel"
_GATED_DELTA = "megatron.core.ssm.gated_delta_net.common"


def replacements(split: TokenSplit) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return Megatron's functions that order tokens for a scan, each with the one that follows ``split``.

    Raises:
        MissingSymbolError: this Megatron-Core has no such function.
    """
    parameters = ("input_", "cp_size", "packed_seq_params")
    undo = require_symbol(_MAMBA, "_undo_attention_load_balancing", parameters=parameters)
    redo = require_symbol(_MAMBA, "_redo_attention_load_balancing", parameters=parameters)
    pairs = [(undo, _undo(split)), (redo, _redo(split))]
    if has_module(_GATED_DELTA):  # releases that split gated delta layers over ranks
        permutation = require_symbol(
            _GATED_DELTA, "_build_thd_cp_a2a_perm", parameters=("cu_seqlens", "cp_size", "t_global")
        )
        pairs.append((permutation, _permutation(split)))
    return pairs


def _undo(split: TokenSplit) -> Callable[..., Tensor]:
    def _undo_attention_load_balancing(input_: Tensor, cp_size: int, packed_seq_params: Any = None) -> Tensor:
        """Reorder ``[seq_len, ...]`` from the order of the ranks to that of the sequence; a pack is split whole."""
        return input_.index_select(0, split.sequence_order(input_.shape[0], cp_size, input_.device))

    return _undo_attention_load_balancing


def _redo(split: TokenSplit) -> Callable[..., Tensor]:
    def _redo_attention_load_balancing(input_: Tensor, cp_size: int, packed_seq_params: Any = None) -> Tensor:
        """Reorder ``[seq_len, ...]`` from the order of the sequence to that of the ranks; a pack is split whole."""
        return input_.index_select(0, split.rank_order(input_.shape[0], cp_size, input_.device))

    return _redo_attention_load_balancing


def _permutation(split: TokenSplit) -> Callable[..., tuple[Tensor, Tensor]]:
    def _build_thd_cp_a2a_perm(cu_seqlens: Tensor, cp_size: int, t_global: int) -> tuple[Tensor, Tensor]:
        """Return int64 ``[t_global]`` twice: rows to take for the order of the sequence, and for that of the ranks."""
        where = (t_global, cp_size, cu_seqlens.device)
        return split.sequence_order(*where), split.rank_order(*where)

    return _build_thd_cp_a2a_perm
