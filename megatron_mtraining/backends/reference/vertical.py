"""Packing of the selected key and value rows of every list side by side, and the way back of their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import VerticalSlashIndex
from ..geometry import BlockGeometry, block_slots


def pack_vertical(key: Tensor, value: Tensor, index: VerticalSlashIndex, geometry: BlockGeometry) -> Tensor:
    """Copy the rows that ``index.vertical`` names, as far as this caller holds them. Does not synchronise the host.

    Args:
        key: ``[batch, seq_kv, num_kv_heads, head_dim]``, laid out as ``geometry.key_blocks`` says.
        value: as ``key``.
        index: whose verticals are packed.
        geometry: which global block each local block of keys is.

    Returns:
        ``[2, rows, num_lists, max_v, head_dim]``, of key and of value: entry j of a list is the row at
        ``index.vertical[row, list, j]``. Padding, and rows that are not held here, are zero bits, so the packs of all
        ranks join by :meth:`megatron_mtraining.transport.base.Transport.assemble`.
    """
    held, row = _local_rows(index, geometry, key)
    packed = torch.stack([tensor.flatten(0, 2)[row] for tensor in (key, value)])
    return packed.masked_fill_(~held.unsqueeze(-1), 0.0)


def unpack_vertical_grad(
    grad_packed: Tensor,
    index: VerticalSlashIndex,
    geometry: BlockGeometry,
    *,
    grad_kv: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Add the gradients of packed rows to the rows that they were copied from: the transpose of :func:`pack_vertical`.

    Repeatable bit for bit on every device: within one list of each key/value head a row is met once, and all else that
    is added to it is zero. Does not synchronise the host.

    Args:
        grad_packed: ``[2, rows, num_lists, max_v, head_dim]``; entries of padding or of other ranks' rows are ignored.
        index: the index that the rows were packed with.
        geometry: the geometry that the rows were packed with.
        grad_kv: ``[2, batch, seq_kv, num_kv_heads, head_dim]``, contiguous, of key and of value; may be overwritten.
        dtype: of the result.

    Returns:
        The sums, of the shape of ``grad_kv``, rounded once.
    """
    held, row = _local_rows(index, geometry, grad_kv[0])
    lists_per_head = index.num_lists // grad_kv.shape[3]
    for packed, grad in zip(grad_packed, grad_kv, strict=True):
        rows = grad.view(-1, grad.shape[-1])
        packed_grad = packed.to(grad.dtype).masked_fill(~held.unsqueeze(-1), 0.0)
        for member in range(lists_per_head):  # those of one head may name the same row, so they follow each other
            lists = slice(member, None, lists_per_head)
            rows.index_add_(0, row[:, lists].flatten(), packed_grad[:, lists].flatten(0, 2))
    return grad_kv.to(dtype)


def _local_rows(index: VerticalSlashIndex, geometry: BlockGeometry, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each vertical in ``key.flatten(0, 2)``.

    Returns:
        ``held``, bool ``[rows, num_lists, max_v]``, and ``row``, int64 of the same shape; where not held, ``row`` is
        some row that exists, spread so that zeros added there do not pile up on one.
    """
    _, seq_kv, num_kv_heads, _ = key.shape
    device, size = key.device, geometry.block_size
    position = index.vertical.long().clamp(0, geometry.seq_len)
    slot = block_slots(geometry.key_blocks, geometry.num_blocks, device)[position // size]
    entry = torch.arange(position.shape[-1], device=device)
    held = (slot >= 0) & (entry < index.num_vertical.unsqueeze(-1)) & (position < geometry.seq_len)
    token = torch.where(held, slot * size + position % size, position % seq_kv)
    kv_head = torch.arange(index.num_lists, device=device) // (index.num_lists // num_kv_heads)
    row = torch.arange(index.rows, device=device) if geometry.documents is None else token.new_zeros(index.rows)
    return held, (row.view(-1, 1, 1) * seq_kv + token) * num_kv_heads + kv_head.view(1, -1, 1)
