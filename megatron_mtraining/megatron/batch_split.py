"""Megatron's own functions that cut a batch for a rank, cutting by the project's layout instead.

Which functions those are depends on the release; each family is known by its names. The public function that training
scripts call stays Megatron's where it only hands the batch on to private ones.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import invalid
from .batch import split_batch
from .compat import MissingSymbolError, require_symbol
from .token_split import TokenSplit

_UTILS = "megatron.core.utils"
_CUTTERS = (
    ("_get_batch_on_this_cp_rank_per_sequence_balancing", "_get_batch_on_this_cp_rank_per_document_balancing"),
    ("get_pretrain_batch_on_this_cp_rank", "get_sft_batch_on_this_cp_rank"),
)
"""Functions that cut a sequence and a pack, both ``(batch, cp_group)``, newest release first."""


def replacements(split: TokenSplit) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return Megatron's functions that cut a batch, each with the one that cuts it by ``split``.

    Raises:
        MissingSymbolError: this Megatron-Core has none of the known families.
    """
    utils = importlib.import_module(_UTILS)
    pairs = []
    indices = getattr(getattr(utils, "tex", None), "thd_get_partitioned_indices", None)
    if indices is not None:  # TransformerEngine's, by which models and scripts of Megatron's cut packs themselves
        pairs.append((indices, _index_pack(split)))
    for family in _CUTTERS:
        if hasattr(utils, family[0]):
            cutters = [require_symbol(_UTILS, name, parameters=("batch", "cp_group")) for name in family]
            return pairs + [(cutter, _cut_batch(split)) for cutter in cutters]
    public = require_symbol(_UTILS, "get_batch_on_this_cp_rank", parameters=("batch", "cp_group"))
    if "is_hybrid_cp" in inspect.signature(public).parameters:
        names = " or ".join(name for name, _ in _CUTTERS)
        raise MissingSymbolError(f"{_UTILS} must have {names}, got neither. This release cuts batches in another way.")
    packed = require_symbol(
        _UTILS, "get_thd_batch_on_this_cp_rank", parameters=("batch", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")
    )
    hybrid = require_symbol(_UTILS, "get_batch_on_this_hybrid_cp_rank", parameters=("batch", "local_cp_size"))
    return [*pairs, (public, _cut_batch(split)), (packed, _cut_pack(split)), (hybrid, _refuse_hybrid())]


def _cut_batch(split: TokenSplit) -> Callable[..., dict[str, Any]]:
    def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
        """Leave this rank's tokens in ``batch``, of a sequence or of a whole pack of documents, and return it."""
        if batch.get("local_cp_size") is not None:
            raise _hybrid()
        cp_group = _context_parallel_group() if cp_group is None else cp_group
        tokens = next((batch[name] for name in ("tokens", "labels") if batch.get(name) is not None), None)
        if cp_group.size() > 1 and tokens is not None:
            sequence = split.sequence(tokens.shape[1], cp_group.size())
            batch.update(split_batch(batch, sequence, cp_group.rank()))
        return batch

    return get_batch_on_this_cp_rank


def _cut_pack(split: TokenSplit) -> Callable[..., tuple[dict[str, Any], Any]]:
    cut = _cut_batch(split)

    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        max_seqlen: Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], Any]:
        """Leave this rank's tokens of the whole pack in ``batch``; return it with the documents' PackedSeqParams."""
        from megatron.core.packed_seq_params import PackedSeqParams

        group = _context_parallel_group()
        if (cp_size, cp_rank) not in ((None, None), (group.size(), group.rank())):
            raise invalid("cp_size and cp_rank", "those of the context-parallel group", (cp_size, cp_rank))
        bounds, padded = _without_batch(cu_seqlens), _without_batch(cu_seqlens_padded)
        longest = int(torch.as_tensor(max_seqlen, device="cpu").max())
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return cut(batch, group), params

    return get_thd_batch_on_this_cp_rank


def _index_pack(split: TokenSplit) -> Callable[..., Tensor]:
    def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, cp_size: int, rank: int) -> Tensor:
        """Return the positions of a rank's tokens in the whole pack, int32, on the device of ``cu_seqlens``."""
        order = split.rank_order(total_tokens, cp_size, cu_seqlens.device)
        return order.view(cp_size, -1)[rank].to(torch.int32)

    return thd_get_partitioned_indices


def _without_batch(bounds: Tensor | None) -> Tensor | None:
    """Return bounds of documents as the attention takes them; loaders put a dimension of one row before them."""
    return bounds if bounds is None or bounds.dim() == 1 else bounds.squeeze(0)


def _refuse_hybrid() -> Callable[..., None]:
    def get_batch_on_this_hybrid_cp_rank(*_: Any, **__: Any) -> None:
        """Refuse sequences over groups of different sizes."""
        raise _hybrid()

    return get_batch_on_this_hybrid_cp_rank


def _hybrid() -> ValueError:
    return invalid(
        "hybrid_context_parallel",
        "False",
        True,
        "Every sequence uses the same context-parallel group; leave --hybrid-context-parallel out.",
    )


def _context_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()
