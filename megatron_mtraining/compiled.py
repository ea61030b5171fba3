"""Attention on one device as one operator each way, for torch.compile with ``fullgraph=True`` too.

Which tiles a backend walks depends on the entries of the index, which a traced graph does not have. Inside an operator
they are there again: all checks run, and the same code as without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .config import MTrainingConfig
from .layout import SequenceLayout
from .ring import RingContext, post_kv
from .ring.ring import pack_columns, ring_backward, ring_forward
from .tensors import accumulate_dtype
from .transport import Groups, as_ring_groups
from .types import AttentionIndex, BlockListIndex, VerticalSlashIndex
from .validate import default_config, validate_request


def is_one_operator(
    config: MTrainingConfig | None,
    index: AttentionIndex | None,
    *,
    layout: SequenceLayout | None,
    groups: Groups | None,
    num_valid: Tensor | None,
) -> bool:
    """Return whether a call is attention on one device with a given index; torch.compile traces any other as it is."""
    if not isinstance(index, AttentionIndex) or not all(each is None for each in (layout, groups, num_valid)):
        return False
    return config is None or config.block_size == index.block_size


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: AttentionIndex,
    *,
    softmax_scale: float | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Compute attention with a given index under a compiler; arguments that do not fit raise when the graph runs."""
    lists = [tensor for tensor in index.tensors if tensor is not None]
    blocks = (0, None) if index.has_columns else (index.chunk_blocks, index.query_blocks)
    return _forward(query, key, value, lists, index.block_size, *blocks, cu_seqlens, softmax_scale, backend)


def _index(lists: Sequence[Tensor], block_size: int, chunk_blocks: int, query_blocks: Tensor | None) -> AttentionIndex:
    if query_blocks is None:
        return VerticalSlashIndex(*lists, block_size=block_size)
    return BlockListIndex(*lists, chunk_blocks=chunk_blocks, block_size=block_size, query_blocks=query_blocks)


def _prepared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: AttentionIndex,
    softmax_scale: float | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[RingContext, Tensor | None]:
    """Return the validated call and the packed columns."""
    request = validate_request(
        query,
        key,
        value,
        default_config(index.block_size, backend),
        index=index,
        layout=None,
        groups=as_ring_groups(None),
        softmax_scale=softmax_scale,
        cu_seqlens=cu_seqlens,
        num_valid=None,
    )
    context = RingContext.of(request)
    return context, pack_columns(key, value, index, context)


@torch.library.custom_op("mtraining::sparse_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: Sequence[Tensor],
    block_size: int,
    chunk_blocks: int,
    query_blocks: Tensor | None,
    cu_seqlens: Tensor | None,
    softmax_scale: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    index = _index(lists, block_size, chunk_blocks, query_blocks)
    context, packed = _prepared(query, key, value, index, softmax_scale, cu_seqlens, backend)
    posted = post_kv(key, value, context.schedule, context.groups)
    out, lse = ring_forward(query, posted, packed, index, context)
    return out.contiguous(), lse.contiguous()


@_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, seq, num_heads, _ = query.shape
    lse = query.new_empty((batch, num_heads, seq), dtype=accumulate_dtype(query.dtype))
    return query.new_empty(query.shape), lse


@torch.library.custom_op("mtraining::sparse_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lists: Sequence[Tensor],
    block_size: int,
    chunk_blocks: int,
    query_blocks: Tensor | None,
    cu_seqlens: Tensor | None,
    softmax_scale: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    index = _index(lists, block_size, chunk_blocks, query_blocks)
    context, packed = _prepared(query, key, value, index, softmax_scale, cu_seqlens, backend)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    delta = context.backend.softmax_delta(grad_out, out, grad_lse)
    grads = ring_backward(grad_out, query, key, value, packed, lse, delta, index, context)
    # Those of key and value are views of one tensor, which an operator must not return.
    return tuple(grad.clone(memory_format=torch.contiguous_format) for grad in grads)


@_backward.register_fake
def _(grad_out: Any, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, lists, *ctx.sizes, query_blocks, cu_seqlens, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(query, key, value, *output, query_blocks, cu_seqlens, *lists)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, query_blocks, cu_seqlens, *lists = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * 10
    given = (lists, *ctx.sizes, query_blocks, cu_seqlens, ctx.scale, ctx.backend)
    return *_backward(grad_out, grad_lse, query, key, value, out, lse, *given), [None] * len(lists), *(None,) * 6


_forward.register_autograd(_differentiate, setup_context=_save)
