"""Tensors and numbers into the structs of csrc/params.h, which see for every field."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, DTYPES


def attention_params(query: Tensor, softmax_scale: float, query_tiles: Tensor) -> _C.AttentionParams:
    """The struct with the fields that every operation reads."""
    params = _C.AttentionParams()
    params.device, params.dtype = query.device.index, DTYPES[query.dtype]
    params.batch, params.seq_q, params.num_heads, params.head_dim = query.shape
    params.softmax_scale = softmax_scale
    params.query = rows(query)
    params.query_tiles, params.num_query_tiles = query_tiles.data_ptr(), query_tiles.shape[0]
    return params


def aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a contiguous copy where a row of head_dim is not contiguous and 16-byte aligned."""
    step = 16 // tensor.element_size()
    strided = any(
        stride % step for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1
    )
    if tensor.stride(-1) != 1 or strided or tensor.data_ptr() % 16:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def rows(tensor: Tensor) -> tuple[int, int, int, int]:
    """``Rows`` of a ``[batch, seq, heads, head_dim]`` tensor."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)


def packed_rows(tensor: Tensor) -> tuple[int, int, int, int]:
    """``Rows`` of a ``[rows, lists, entries, head_dim]`` tensor."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(2), tensor.stride(1)


def row_scalars(tensor: Tensor) -> tuple[int, int, int]:
    """``RowScalars`` of a ``[batch, heads, seq]`` tensor."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


def set_keys(params: _C.AttentionParams, key: Tensor, value: Tensor, key_slots: Tensor) -> None:
    """What circulates in a ring: keys and values of some blocks, and where each block of the sequence is among them."""
    params.key, params.value = rows(key), rows(value)
    params.seq_kv, params.num_kv_heads = key.shape[1], key.shape[2]
    params.key_slots, params.num_blocks = key_slots.data_ptr(), key_slots.numel()


def set_packed(params: _C.AttentionParams, packed: Tensor, document_tiles: Tensor) -> None:
    """The packed verticals, of key and of value, and which query tiles each document has."""
    params.packed_key, params.packed_value = map(packed_rows, packed)
    params.max_vertical = packed.shape[3]
    params.num_words = -(-packed.shape[3] // 64)
    params.document_tiles, params.num_documents = document_tiles.data_ptr(), document_tiles.numel() - 1


def set_tables(params: _C.AttentionParams, **tables: Tensor) -> None:
    """Lists and counts of the index, by their names there. Its rows are batch rows, or documents of a batch of one."""
    for name, table in tables.items():
        setattr(params, name, (table.data_ptr(), table.stride(0), table.stride(1)))
        params.num_documents, params.num_lists = table.shape[0] - params.batch + 1, table.shape[1]


def set_lists(params: _C.AttentionParams, chunk_blocks: int, **lists: tuple[Tensor, Tensor, Tensor | None]) -> None:
    """Block lists, by their names there: where each list starts ``[batch, lists, *]``, entries and row masks."""
    params.chunk_blocks = chunk_blocks
    for name, (starts, entries, row_masks) in lists.items():
        masks = 0 if row_masks is None else row_masks.data_ptr()
        setattr(params, name, (starts.data_ptr(), entries.data_ptr(), masks, starts.shape[2]))
        params.num_lists = starts.shape[1]


def set_results(params: _C.AttentionParams, **results: Tensor | None) -> None:
    """Where results go, by their names there; None for one that is not asked for."""
    for name, tensor in results.items():
        setattr(params, name, (0, 0, 0, 0) if tensor is None else rows(tensor))


def set_statistics(params: _C.AttentionParams, grad_out: Tensor, lse: Tensor, delta: Tensor) -> None:
    """What a backward knows of the queries."""
    params.grad_out, params.lse, params.delta = rows(grad_out), row_scalars(lse), row_scalars(delta)


def set_key_gradients(
    params: _C.AttentionParams, grad_keys: Tensor, key_tiles: Tensor, query_slots: Tensor | None = None
) -> None:
    """Where the gradients of keys and values are, and how to walk from keys to queries."""
    params.grad_key, params.grad_value = map(rows, grad_keys)
    params.key_tiles, params.num_key_tiles = key_tiles.data_ptr(), key_tiles.shape[0]
    if query_slots is not None:
        params.query_slots = query_slots.data_ptr()


def set_packed_gradients(params: _C.AttentionParams, grad_packed: Tensor) -> None:
    """Where the gradients of the packed verticals are, of key and of value."""
    params.grad_packed_key, params.grad_packed_value = map(packed_rows, grad_packed)


def current_stream(device: torch.device) -> int:
    """Address of the stream that launches go to."""
    return torch.cuda.current_stream(device).cuda_stream
