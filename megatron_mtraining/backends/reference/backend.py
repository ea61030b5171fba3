"""Implementation of ``backends/protocol.py`` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...tensors import accumulate_dtype
from ...types import AttentionIndex, AttentionOutput, VerticalSlashIndex
from ..geometry import BlockGeometry, block_slots
from .pairs import QueryTiles, TilePairs, list_pairs, slash_pairs, vertical_pairs
from .softmax import OnlineSoftmax, SoftmaxGradient, from_tiles, row_tiles, to_tiles

_SCRATCH_BYTES = 8 << 20
"""Bytes that one chunk of tile pairs may take for scores and gathered tiles: about what stays in a CPU's last cache."""

_VERTICAL_TILE = 64
"""Packed verticals in a key tile."""


_PIECE_ELEMENTS = 1 << 24
"""Elements of a product in the accumulate dtype that are alive at one time: 64 MiB of float32."""


class ReferenceBackend:
    """Blockwise attention in plain PyTorch on any device, in float32 (float64 for float64 input).

    Memory is that of copies of the inputs plus some 8 MiB, whatever the sequence length. Results repeat bit for bit.
    Any ``block_size``, any ``head_dim``. Unlike kernels it waits for the device: it reads counts of pairs on the host.
    Autocast does not reach it; on a GPU its float32 products follow ``torch.set_float32_matmul_precision``.
    """

    name = "reference"

    def pack(self, key: Tensor, value: Tensor, index: AttentionIndex, geometry: BlockGeometry) -> Tensor | None:
        """See :class:`megatron_mtraining.backends.protocol.AttentionBackend`."""
        if not index.has_columns:
            return None
        held, row = _local_rows(index, geometry, key)
        packed = torch.stack([tensor.flatten(0, 2)[row] for tensor in (key, value)])
        return packed.masked_fill_(~held.unsqueeze(-1), 0.0)

    def unpack(
        self,
        grad_packed: Tensor,
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        grad_kv: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Unpack as :class:`megatron_mtraining.backends.protocol.AttentionBackend` does.

        Repeatable bit for bit on every device: within one list of each key/value head a row is met once, and all else
        that is added to it is zero.
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

    def softmax_delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """See :class:`megatron_mtraining.backends.protocol.AttentionBackend`."""
        dtype = accumulate_dtype(grad_out.dtype)
        batch, seq, heads, head_dim = out.shape
        delta = out.new_empty((batch, heads, seq), dtype=dtype)
        step = max(1, _PIECE_ELEMENTS // (batch * heads * head_dim))
        for first in range(0, seq, step):
            piece = slice(first, first + step)
            product = grad_out[:, piece].to(dtype) * out[:, piece]
            delta[..., piece] = product.sum(-1).transpose(1, 2)
        return delta if grad_lse is None else delta.sub_(grad_lse)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: AttentionIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        packed: Tensor | None = None,
        previous: AttentionOutput | None = None,
        is_last: bool,
    ) -> AttentionOutput:
        """See :class:`megatron_mtraining.backends.protocol.AttentionBackend`."""
        size, dtype = geometry.block_size, accumulate_dtype(query.dtype)
        if packed is not None:
            columns = _column_chunks(query, index, geometry)
            tiles = [to_tiles(tensor, _VERTICAL_TILE, dtype) for tensor in packed]
            previous = _forward(query, *tiles, columns, geometry, softmax_scale, previous)
        pairs = _block_pairs(query, key, index, geometry)
        tiles = [to_tiles(tensor.transpose(1, 2), size, dtype) for tensor in (key, value)]
        out, lse = _forward(query, *tiles, pairs, geometry, softmax_scale, previous)
        return AttentionOutput(out.to(query.dtype) if is_last else out, lse)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lse: Tensor,
        delta: Tensor,
        index: AttentionIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        packed: Tensor | None = None,
        previous: Tensor | None = None,
        is_last: bool,
        on_kv_gradients: Callable[[Tensor, Tensor | None], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See :class:`megatron_mtraining.backends.protocol.AttentionBackend`."""
        size, dtype = geometry.block_size, accumulate_dtype(query.dtype)
        grad_packed = None
        if packed is not None:
            columns = _column_chunks(query, index, geometry)
            tiles = [to_tiles(tensor, _VERTICAL_TILE, dtype) for tensor in packed]
            of_columns, *grads = _backward(grad_out, query, *tiles, lse, delta, columns, geometry, softmax_scale)
            grad_packed = torch.stack([from_tiles(grad, packed.shape[1:3], packed.shape[3]) for grad in grads])
            previous = of_columns if previous is None else of_columns.add_(previous)
        pairs = _block_pairs(query, key, index, geometry)
        tiles = [to_tiles(tensor.transpose(1, 2), size, dtype) for tensor in (key, value)]
        grad_query, *grads = _backward(grad_out, query, *tiles, lse, delta, pairs, geometry, softmax_scale)
        if previous is not None:
            grad_query = grad_query.add_(previous)
        batch, seq_kv, num_kv_heads, _ = key.shape
        grad_kv = torch.stack([from_tiles(grad, (batch, num_kv_heads), seq_kv).transpose(1, 2) for grad in grads])
        if on_kv_gradients is not None:
            on_kv_gradients(grad_kv, grad_packed)
        return grad_query.to(query.dtype) if is_last else grad_query, grad_kv, grad_packed


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


def _block_pairs(query: Tensor, key: Tensor, index: AttentionIndex, geometry: BlockGeometry) -> Iterator[TilePairs]:
    """Return an iterator over tile pairs with the current KV block: those of distances, or of block lists."""
    tiles = QueryTiles(index, geometry, batch=query.shape[0], num_heads=query.shape[2], device=query.device)
    chunk = _pairs_in_chunk(query, geometry.block_size, geometry.block_size)
    pairs = slash_pairs if index.has_columns else list_pairs
    return pairs(tiles, num_kv_heads=key.shape[2], chunk=chunk)


def _column_chunks(query: Tensor, index: VerticalSlashIndex, geometry: BlockGeometry) -> Iterator[TilePairs]:
    tiles = QueryTiles(index, geometry, batch=query.shape[0], num_heads=query.shape[2], device=query.device)
    chunk = _pairs_in_chunk(query, geometry.block_size, _VERTICAL_TILE)
    return vertical_pairs(tiles, tile_len=_VERTICAL_TILE, chunk=chunk)


def _pairs_in_chunk(query: Tensor, query_len: int, key_len: int) -> int:
    """Return how many pairs fit in scratch: scores and their gradients, four gathered tiles, three products."""
    elements = 2 * query_len * key_len + (4 * query_len + 3 * key_len) * query.shape[-1]
    return max(1, _SCRATCH_BYTES // (elements * accumulate_dtype(query.dtype).itemsize))


def _scaled_query_tiles(query: Tensor, block_size: int, softmax_scale: float) -> Tensor:
    tiles = to_tiles(query.transpose(1, 2), block_size, accumulate_dtype(query.dtype))
    return tiles * softmax_scale


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: Iterator[TilePairs],
    geometry: BlockGeometry,
    softmax_scale: float,
    previous: AttentionOutput | None,
) -> AttentionOutput:
    """Run the chunks over key and value tiles, from ``previous`` on."""
    size = geometry.block_size
    batch, seq_q, heads, _ = query.shape
    query = _scaled_query_tiles(query, size, softmax_scale)
    if previous is None:
        state = OnlineSoftmax(query.new_full(query.shape[:2], -torch.inf), torch.zeros_like(query))
    else:
        lse = row_tiles(previous.lse, size, query.dtype)
        state = OnlineSoftmax(lse, to_tiles(previous.out.transpose(1, 2), size, query.dtype))
    with torch.autocast(query.device.type, enabled=False):
        for chunk in pairs:
            state.add(chunk, query, key, value)
    out, lse = state.finish()
    out = from_tiles(out, (batch, heads), seq_q).transpose(1, 2).contiguous()
    return AttentionOutput(out, from_tiles(lse.unsqueeze(-1), (batch, heads), seq_q).squeeze(-1).contiguous())


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    pairs: Iterator[TilePairs],
    geometry: BlockGeometry,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the chunks over key and value tiles: the gradient of ``query``, and those of the tiles."""
    size, dtype = geometry.block_size, key.dtype
    batch, seq_q, heads, _ = query.shape
    scaled = _scaled_query_tiles(query, size, softmax_scale)
    gradient = SoftmaxGradient(
        query=scaled,
        key=key,
        value=value,
        grad_out=to_tiles(grad_out.transpose(1, 2), size, dtype),
        lse=row_tiles(lse, size, dtype),
        delta=row_tiles(delta, size, dtype),
        grad_query=torch.zeros_like(scaled),
        grad_key=torch.zeros_like(key),
        grad_value=torch.zeros_like(value),
    )
    with torch.autocast(query.device.type, enabled=False):
        for chunk in pairs:
            gradient.add(chunk)
    grad_query = from_tiles(gradient.grad_query, (batch, heads), seq_q).transpose(1, 2).mul_(softmax_scale)
    return grad_query.contiguous(), gradient.grad_key, gradient.grad_value
