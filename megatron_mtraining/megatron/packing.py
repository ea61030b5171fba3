"""Documents of a packed batch, read off Megatron's PackedSeqParams once per batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import invalid
from ..types import Documents

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

_CACHE = "_mtraining_documents"
_SOURCES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded")
_MADE_BY = "Use megatron_mtraining.megatron.packed_seq_params."


@dataclass(frozen=True, slots=True)
class _Reading:
    """Bounds as they were read, and their source."""

    bounds: Tensor
    sources: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    seq_len: int

    def is_of(self, params: PackedSeqParams, seq_len: int) -> bool:
        """Return whether the same tensors hold the same values still, as far as torch counts who writes to them."""
        sources = _sources(params)
        same = all(now is then for now, then in zip(sources, self.sources, strict=True))
        return same and seq_len == self.seq_len and _versions(sources) == self.versions


def documents_of(params: PackedSeqParams | None, *, seq_len: int) -> Tensor:
    """Return the bounds of the documents, padding between them as documents of its own.

    Reading them off a device waits for it, so they are kept on ``params`` for the next layers, until one of the tensors
    is another one or was written to. On the CPU reading costs nothing, and they are read at every call: a loader may
    fill them through memory that torch does not watch.

    Args:
        params: ``cu_seqlens_q`` and, where documents are padded, ``cu_seqlens_q_padded``, over the whole pack.
        seq_len: tokens in the whole pack.

    Returns:
        int32 ``[documents + 1]``, on the CPU, sharing no memory with ``params``.

    Raises:
        ValueError: no bounds, bounds that do not cover the pack, or other bounds for keys than for queries.
    """
    if params is None or params.cu_seqlens_q is None:
        raise invalid("packed_seq_params", "given with cu_seqlens for packed input", params, _MADE_BY)
    if params.qkv_format != "thd":
        raise invalid("packed_seq_params.qkv_format", "'thd'", repr(params.qkv_format), _MADE_BY)
    cached: _Reading | None = getattr(params, _CACHE, None)
    if cached is not None and cached.is_of(params, seq_len):
        return cached.bounds
    bounds = _read(params)
    Documents.from_cu_seqlens(bounds, seq_len=seq_len)  # checks them
    sources = _sources(params)
    if all(_is_watched(source) for source in sources if source is not None):
        setattr(params, _CACHE, _Reading(bounds, sources, _versions(sources), seq_len))
    return bounds


def check_unpacked(params: PackedSeqParams | None) -> None:
    """Refuse bounds of documents beside input that is not packed, where they would be ignored.

    Raises:
        ValueError: naming what was given.
    """
    if params is None:
        return
    if params.qkv_format not in ("sbhd", None):
        raise invalid(
            "packed_seq_params.qkv_format", "'sbhd' for input of four dimensions", repr(params.qkv_format), _MADE_BY
        )
    if params.cu_seqlens_q is not None:
        raise invalid(
            "packed_seq_params.cu_seqlens_q", "None for input of four dimensions", params.cu_seqlens_q, _MADE_BY
        )


def check_packing(params: PackedSeqParams, *, layout: str, cp_size: int, fuses_rope: bool) -> None:
    """Refuse packs that are split over the ranks in a way other than the layout's.

    Raises:
        ValueError: naming the option and what to do.
    """
    if params.local_cp_size is not None or params.cp_group is not None:
        raise invalid(
            "packed_seq_params.local_cp_size",
            "None",
            params.local_cp_size,
            "Hybrid context parallelism is not supported; every sequence uses the same group.",
        )
    if cp_size > 1 and layout == "zigzag":
        raise invalid(
            "layout",
            f"striped, node_striped, rotated or contiguous for packed documents on {cp_size} ranks",
            layout,
            "Megatron's zigzag splits each document by itself; the other layouts split the pack.",
        )
    if cp_size > 1 and fuses_rope:
        raise invalid(
            "apply_rope_fusion",
            f"False for packed documents on {cp_size} ranks",
            True,
            "The fused kernel knows Megatron's split only; pass --no-rope-fusion.",
        )


def _sources(params: PackedSeqParams) -> tuple[Tensor | None, ...]:
    return tuple(getattr(params, name) for name in _SOURCES)


def _versions(sources: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Return how often each tensor was written to."""
    return tuple(source._version for source in sources if source is not None)


def _is_watched(source: Tensor) -> bool:
    """Return whether torch counts every writing to a tensor; those of inference mode have no count."""
    return source.device.type != "cpu" and not source.is_inference()


def _read(params: PackedSeqParams) -> Tensor:
    bounds, keys = params.cu_seqlens_q.cpu(), params.cu_seqlens_kv
    if keys is not None and keys is not params.cu_seqlens_q and not torch.equal(keys.cpu(), bounds):
        raise invalid("cu_seqlens_kv", "equal to cu_seqlens_q", keys.tolist(), "Attention is to itself.")
    if params.cu_seqlens_q_padded is None:
        return bounds.clone()
    starts = params.cu_seqlens_q_padded.cpu()
    ends_of_tokens = starts[:-1] + bounds.diff()
    return torch.cat([torch.stack([starts[:-1], ends_of_tokens], dim=1).flatten(), starts[-1:]]).contiguous()
