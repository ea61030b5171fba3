"""Validation of the arguments of a call, for one device and for a ring alike."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .auto import with_schedule
from .config import MTrainingConfig
from .errors import check_type, invalid
from .layout import SequenceLayout, blocks_of, check_layout
from .request import AttentionRequest, checked_counts
from .transport import RingGroups, Transport, resolve_transports
from .types import AttentionIndex, BlockListIndex, Documents, VerticalSlashIndex

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def validate_request(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    config: MTrainingConfig | None,
    *,
    index: AttentionIndex | None,
    layout: SequenceLayout | None,
    groups: RingGroups,
    softmax_scale: float | None,
    cu_seqlens: Tensor | None,
    num_valid: Tensor | None,
) -> AttentionRequest:
    """Validate the arguments of a call; each fault is one sentence.

    The entries of an index are read only where that costs no synchronisation: on the CPU. Arguments are those of
    :func:`megatron_mtraining.sparse_attention`.

    Raises:
        ValueError: an argument is of a wrong shape, dtype, device or value, or disagrees with another one.
    """
    if config is None and index is None and value is not None:
        raise invalid("config or index", "given", "neither", "Pass an MTrainingConfig, or an index of your own.")
    if index is not None:
        check_type("index", index, AttentionIndex, "a VerticalSlashIndex or a BlockListIndex", "select makes one.")
        config = default_config(index.block_size) if config is None else config
    check_type("config", config, MTrainingConfig, "an MTrainingConfig")
    check_bshd("query", query, query=query)
    transports = resolve_transports(groups, config.schedule)
    cp = transports.cp
    if index is not None and index.block_size != config.block_size:
        raise invalid("index.block_size", f"the block_size {config.block_size} of config", index.block_size)
    layout = validate_layout(query, layout, cp, block_size=config.block_size)
    check_query_and_key(query, key, packed=cu_seqlens is not None)
    if value is not None:
        check_bshd("value", value, query=query)
        if value.shape != key.shape:
            raise invalid("value.shape", f"{tuple(key.shape)} as key has", tuple(value.shape))
    documents = None if cu_seqlens is None else Documents.from_cu_seqlens(cu_seqlens, seq_len=layout.seq_len)
    spans = ((0, layout.seq_len),) * query.shape[0] if documents is None else documents.spans
    if index is not None:
        _validate_index(index, query, key, layout, cp.rank, documents)
    if config.schedule == "auto" and cp.size > 1:
        config = with_schedule(config, query, key, layout=layout, transports=transports)
        transports = resolve_transports(groups, config.schedule)
    return AttentionRequest(
        query=query,
        key=key,
        value=value,
        config=config,
        index=index,
        layout=layout,
        groups=transports,
        softmax_scale=checked_scale(softmax_scale, query.shape[3]),
        documents=documents,
        num_valid=checked_counts(num_valid, spans),
    )


@lru_cache(maxsize=8)
def default_config(block_size: int, backend: str = "auto") -> MTrainingConfig:
    """Return the configuration beside an index that comes without one."""
    return MTrainingConfig(block_size=block_size, backend=backend)


def validate_layout(query: Tensor, layout: SequenceLayout | None, cp: Transport, *, block_size: int) -> SequenceLayout:
    """Return the layout of a call, on one device that of one rank.

    Raises:
        ValueError: layout, group, block size and local length do not fit together.
    """
    if layout is None:
        if cp.size > 1:
            raise invalid("layout", "given with groups", None, "Pass the layout that the batch was split by.")
        return _whole_sequence(query.shape[1], block_size)
    check_layout(layout)
    if layout.cp_size != cp.size:
        remedy = "Pass the groups that the sequence is split over." if cp.size == 1 else ""
        raise invalid("layout.cp_size", f"the size {cp.size} of the context-parallel group", layout.cp_size, remedy)
    if layout.block_size != block_size:
        raise invalid("layout.block_size", f"the block_size {block_size} of config and index", layout.block_size)
    if layout.local_len != query.shape[1]:
        remedy = "Give each rank its own part, as shard_sequence cuts it."
        raise invalid("query.shape[1]", f"the layout's local_len {layout.local_len}", query.shape[1], remedy)
    return layout


@lru_cache(maxsize=64)
def _whole_sequence(seq_len: int, block_size: int) -> SequenceLayout:
    return SequenceLayout("contiguous", seq_len=seq_len, cp_size=1, block_size=block_size)


def _validate_index(
    index: AttentionIndex,
    query: Tensor,
    key: Tensor,
    layout: SequenceLayout,
    cp_rank: int,
    documents: Documents | None,
) -> None:
    _check_index_shape(query, key, index, documents)
    if index.is_global:
        if index.device.type == "cpu":
            _check_index_entries(index, layout.seq_len)
        return
    _check_query_blocks(query, index, blocks_of(layout, cp_rank))
    if index.device.type == "cpu":
        _check_block_lists(index, layout.seq_len)


def _check_index_shape(query: Tensor, key: Tensor, index: AttentionIndex, documents: Documents | None) -> None:
    by_batch = documents is None or not index.is_global
    rows, what = (query.shape[0], "the batch size") if by_batch else (documents.count, "documents")
    if index.rows != rows:
        raise invalid("index.rows", f"{rows}, {what}", index.rows)
    heads = query.shape[2], key.shape[2]
    if index.num_lists not in heads:
        raise invalid("index.num_lists", f"{heads[0]} or {heads[1]}, the heads of query or of key", index.num_lists)
    if index.device != query.device:
        raise invalid("index.device", f"{query.device} as query has", index.device, "Use index.to().")
    is_inference = any(tensor is not None and tensor.is_inference() for tensor in index.tensors)
    if is_inference and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise invalid("index", "made outside torch.inference_mode for a call with gradients", "an inference tensor")


def _check_query_blocks(query: Tensor, index: BlockListIndex, expected: Tensor) -> None:
    """Refuse the lists of another rank or layout, whose entries alone would not show it."""
    num_blocks = -(-query.shape[1] // index.block_size)
    if index.num_query_blocks != num_blocks:
        raise invalid("index.starts", f"of lists for {num_blocks} query blocks, those here", index.num_query_blocks)
    if not torch.equal(index.query_blocks, expected):
        slot = int((index.query_blocks != expected).nonzero()[0])
        raise invalid(
            f"index.query_blocks[{slot}]",
            f"{int(expected[slot])}, the block of the queries there",
            int(index.query_blocks[slot]),
            "Select with the layout and the rank of this call.",
        )


def _check_index_entries(index: VerticalSlashIndex, seq_len: int) -> None:
    num_blocks = -(-seq_len // index.block_size)
    for name, entries, counts, limit in (
        ("vertical", index.vertical, index.num_vertical, seq_len),
        ("slash", index.slash, index.num_slash, num_blocks),
    ):
        width = entries.shape[-1]
        if not bool(((counts >= 0) & (counts <= width)).all()):
            raise invalid(f"index.num_{name}", f"from 0 to the width {width}", _range(counts))
        is_counted = torch.arange(width, device="cpu") < counts.unsqueeze(-1)
        if not bool(((entries >= 0) & (entries < limit) | ~is_counted).all()):
            raise invalid(f"index.{name}", f"in [0, {limit})", _range(entries[is_counted]))
        if not bool(((entries[..., 1:] > entries[..., :-1]) | ~is_counted[..., 1:]).all()):
            raise invalid(f"index.{name}", "strictly ascending in every list", "a list that is not")
    if not bool(((index.num_slash > 0) & (index.slash[..., :1].sum(-1) == 0)).all()):
        raise invalid("index.slash", "a list that starts with distance 0 for every head", "one that does not")


def _check_block_lists(index: BlockListIndex, seq_len: int) -> None:
    starts, chunks, num_entries = index.starts, index.chunks, index.chunks.numel()
    edges = torch.cat([starts.new_zeros(1), starts.flatten(0, 1)[:, -1]])
    if not (bool((starts.diff() >= 0).all()) and torch.equal(starts[..., 0].flatten(), edges[:-1])):
        raise invalid("index.starts", "ascending from list to list, from 0 on", "other numbers")
    if int(edges[-1]) != num_entries:
        raise invalid("index.chunks", f"of {int(edges[-1])} entries, as index.starts says", num_entries)
    limit = -(-seq_len // (index.block_size * index.chunk_blocks))
    if num_entries and not bool(((chunks >= 0) & (chunks < limit)).all()):
        raise invalid("index.chunks", f"in [0, {limit})", _range(chunks))
    begins_list = torch.zeros(num_entries + 1, dtype=torch.bool, device="cpu")
    begins_list[starts.flatten().long()] = True
    if not bool(((chunks[1:] > chunks[:-1]) | begins_list[1:-1]).all()):
        raise invalid("index.chunks", "strictly ascending in every list", "a list that is not")


def _range(numbers: Tensor) -> str:
    return f"{int(numbers.min())} to {int(numbers.max())}"


def check_query_and_key(query: Tensor, key: Tensor, *, packed: bool) -> None:
    """Check that both are bshd, of one floating dtype, device, batch, length, head_dim; of one row where packed.

    Raises:
        ValueError: one of them is not.
    """
    for name, tensor in (("query", query), ("key", key)):
        check_bshd(name, tensor, query=query)
    for dim, what in ((0, "batch size"), (1, "sequence length"), (3, "head_dim")):
        if key.shape[dim] != query.shape[dim]:
            raise invalid(f"key.shape[{dim}]", f"the {what} {query.shape[dim]} of query", key.shape[dim])
    if query.shape[2] % key.shape[2]:
        raise invalid("query.shape[2]", f"a multiple of the {key.shape[2]} key heads", query.shape[2])
    if packed and query.shape[0] != 1:
        raise invalid("query.shape[0]", "1 when cu_seqlens is given", query.shape[0], "Pack the batch into one row.")


def check_bshd(name: str, tensor: Tensor, *, query: Tensor) -> None:
    """Check for shape ``[batch, seq, heads, head_dim]``, not empty, and the dtype and device of ``query``.

    Raises:
        ValueError: it is not; the sentence calls it ``name``.
    """
    check_type(name, tensor, Tensor, "a tensor")
    if tensor.dim() != 4:
        raise invalid(name, "of shape [batch, seq, heads, head_dim]", tuple(tensor.shape))
    if tensor.dtype not in _DTYPES:
        raise invalid(f"{name}.dtype", "float64, float32, bfloat16 or float16", tensor.dtype)
    if tensor.dtype != query.dtype:
        raise invalid(f"{name}.dtype", f"{query.dtype} as query has", tensor.dtype)
    if tensor.device != query.device:
        raise invalid(f"{name}.device", f"{query.device} as query has", tensor.device)
    if 0 in tensor.shape:
        raise invalid(f"{name}.shape", "at least 1 in every dimension", tuple(tensor.shape))


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Return ``softmax_scale``, or ``head_dim ** -0.5`` for None.

    Raises:
        ValueError: it is not finite and positive.
    """
    if softmax_scale is None:
        return head_dim**-0.5
    try:
        scale = math.nan if isinstance(softmax_scale, (bool, str)) else float(softmax_scale)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0.0):
        raise invalid("softmax_scale", "finite and positive", repr(softmax_scale))
    return scale
