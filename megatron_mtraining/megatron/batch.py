"""Batches of a script that splits them itself: split, padding, positions and documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import invalid
from ..layout import SequenceLayout
from .rope import positions_in_documents
from .runtime import process
from .split import split_batch, thd_params

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def shard_batch(batch: Mapping[str, Any], layout: SequenceLayout, cp_rank: int) -> dict[str, Any]:
    """Return this rank's part of a batch, whose padding is counted for the model that is given the part's tokens.

    Padding is what ends a row, or a document of ``cu_seqlens``, with loss mask 0 and one and the same token; see
    docs/decisions/0019. It selects no key.

    Args:
        batch: ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each ``[batch, seq_len]``, None or absent;
            ``cu_seqlens``, ``cu_seqlens_padded``, ``max_seqlen`` and ``packed_seq_params`` describe the whole sequence
            and pass unchanged, as does what has one value a row, such as the ``dataset_id`` of a blend.
        layout: where each block lives; labels must have been shifted already.
        cp_rank: this rank within its context-parallel group.

    Returns:
        The same keys, the per-token ones ``[batch, local_len]``.

    Raises:
        ValueError: an ``attention_mask``, a key of unknown shape, or a length other than the layout's.
    """
    part = split_batch(batch, layout, cp_rank)
    process().micro_batches.note_split(batch, part)
    return part


def pad_batch(batch: Mapping[str, Any], multiple: int, *, pad_token: int = 0) -> dict[str, Any]:
    """Lengthen a batch to a multiple of ``multiple`` tokens that count for no loss.

    In a packed batch the padding becomes a document of its own. In any other it follows the tokens, which causal
    attention hides. Either way it selects no key.

    Args:
        batch: as for :func:`shard_batch`; ``cu_seqlens`` may be given, ``packed_seq_params`` is made afterwards.
        multiple: :meth:`megatron_mtraining.SequenceLayout.required_multiple`.
        pad_token: the token that fills ``tokens`` and ``labels``.

    Raises:
        ValueError: no ``loss_mask`` to mark the padding in, or ``packed_seq_params`` made already.
    """
    if batch.get("packed_seq_params") is not None:
        raise invalid(
            "packed_seq_params", "made after padding", "one before", "Pass cu_seqlens, then packed_seq_params()."
        )
    seq_len = batch["tokens"].shape[1]
    padding = -seq_len % multiple
    if not padding:
        return dict(batch)
    if batch.get("loss_mask") is None:
        raise invalid("loss_mask", "given for a batch that is padded", None, "Pass one; padding must not count.")
    padded = dict(batch)
    for name, fill in (("tokens", pad_token), ("labels", pad_token), ("loss_mask", 0)):
        if batch.get(name) is not None:
            padded[name] = F.pad(batch[name], (0, padding), value=fill)
    if batch.get("position_ids") is not None:
        ids = batch["position_ids"]
        tail = torch.arange(padding, dtype=ids.dtype, device=ids.device).expand(ids.shape[0], -1)
        start = 0 if batch.get("cu_seqlens") is not None else seq_len
        padded["position_ids"] = torch.cat([ids, tail + start], dim=1)
    if batch.get("cu_seqlens") is not None:
        padded["cu_seqlens"] = torch.cat([batch["cu_seqlens"], batch["cu_seqlens"].new_tensor([seq_len + padding])])
    return padded


def document_position_ids(cu_seqlens: Tensor) -> Tensor:
    """Return int64 ``[1, tokens]`` positions that restart per document of ``cu_seqlens``, int32 ``[documents + 1]``."""
    positions = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    return positions_in_documents(positions, cu_seqlens)[None]


def packed_seq_params(cu_seqlens: Tensor) -> PackedSeqParams:
    """Return Megatron's description of a pack of documents, for ``GPTModel.forward``.

    Args:
        cu_seqlens: int32 ``[documents + 1]``, over the whole pack: from 0 to the number of its tokens.
    """
    return thd_params(cu_seqlens, None, int((cu_seqlens[1:] - cu_seqlens[:-1]).max()))
