"""Arguments of the structs of csrc/params.h: tensors and numbers by the names of their fields."""

from __future__ import annotations

import torch
from torch import Tensor

from . import DTYPES

Fields = dict[str, Tensor | tuple[Tensor | None, ...] | float | None]
"""Tensor, number or None of each field. ``packed`` and ``grad_keys`` fill two: of key, and of value."""


def of_query(query: Tensor, query_tiles: Tensor, softmax_scale: float) -> Fields:
    """Return the fields that every operation reads."""
    batch, seq_q, num_heads, head_dim = query.shape
    return {
        "device": query.get_device(),
        "dtype": DTYPES[query.dtype],
        "batch": batch,
        "seq_q": seq_q,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "softmax_scale": softmax_scale,
        "query": query,
        "query_tiles": query_tiles,
        "num_query_tiles": query_tiles.shape[0],
    }


def of_keys(key: Tensor, value: Tensor, key_slots: Tensor) -> Fields:
    """Return the fields that circulate in a ring: keys and values of some blocks, and their slots by global block."""
    _, seq_kv, num_kv_heads, _ = key.shape
    return {
        "key": key,
        "value": value,
        "seq_kv": seq_kv,
        "num_kv_heads": num_kv_heads,
        "key_slots": key_slots,
        "num_blocks": key_slots.numel(),
    }


def of_packed(packed: Tensor, document_tiles: Tensor) -> Fields:
    """Return the fields of the packed verticals, of key and of value, and of the query tiles of each document."""
    max_vertical = packed.shape[3]
    return {
        "packed": packed,
        "max_vertical": max_vertical,
        "num_column_tiles": num_column_tiles(max_vertical),
        "document_tiles": document_tiles,
    }


def num_column_tiles(max_vertical: int) -> int:
    """Return the number of tiles of 64 packed columns, each with one 64-bit mask in the vertical bitmask."""
    return -(-max_vertical // 64)


def of_tables(batch: int, **tables: Tensor) -> Fields:
    """Return the index's tables by their names there; its rows are batch rows, or documents of a batch of one."""
    rows, num_lists, *_ = next(iter(tables.values())).shape
    return {**tables, "num_documents": rows - batch + 1, "num_lists": num_lists}


def of_lists(chunk_blocks: int, num_documents: int, **lists: tuple[Tensor, Tensor, Tensor | None]) -> Fields:
    """Return block lists by their names there: starts of the lists ``[batch, lists, *]``, entries and row masks."""
    starts, *_ = next(iter(lists.values()))
    return {**lists, "chunk_blocks": chunk_blocks, "num_documents": num_documents, "num_lists": starts.shape[1]}


def of_key_gradients(grad_keys: Tensor | None, key_tiles: Tensor, query_slots: Tensor | None = None) -> Fields:
    """Return the fields for the gradients of keys and values, and for the iteration from keys to queries."""
    return {
        "grad_keys": grad_keys,
        "key_tiles": key_tiles,
        "num_key_tiles": key_tiles.shape[0],
        "query_slots": query_slots,
    }


def aligned(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a contiguous copy where a row of head_dim is not contiguous and 16-byte aligned."""
    if tensor.data_ptr() % 16 == 0 and (tensor.is_contiguous() or _has_aligned_strides(tensor)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _has_aligned_strides(tensor: Tensor) -> bool:
    step = 16 // tensor.element_size()
    *outer, inner = tensor.stride()
    return inner == 1 and not any(
        stride % step for size, stride in zip(tensor.shape[:-1], outer, strict=True) if size > 1
    )


def current_stream(device: int) -> int:
    """Return the address of the stream that launches go to."""
    return torch.cuda.current_stream(device).cuda_stream
