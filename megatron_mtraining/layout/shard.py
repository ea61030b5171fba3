"""Cutting of a tensor along its sequence into the parts of the ranks, and the way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import as_integer, invalid
from .sequence_layout import SequenceLayout, check_layout


def token_positions(layout: SequenceLayout, *, cp_rank: int) -> Tensor:
    """Return the global positions of the tokens that a rank holds, in its order.

    Args:
        layout: where each block lives.
        cp_rank: the rank, from 0 to ``layout.cp_size - 1``.

    Returns:
        int64 ``[layout.local_len]``, on the CPU, ascending.

    Raises:
        ValueError: the layout has no such rank.
    """
    check_layout(layout)
    rule = f"in [0, {layout.cp_size})"
    rank = as_integer("cp_rank", cp_rank, least=0, rule=rule)
    if rank >= layout.cp_size:
        raise invalid("cp_rank", rule, rank)
    starts = layout.blocks(rank) * layout.block_size
    positions = (starts[:, None] + torch.arange(layout.block_size, device="cpu")).flatten()
    return positions[: layout.local_len]


def shard_sequence(tensor: Tensor, layout: SequenceLayout, *, cp_rank: int, dim: int) -> Tensor:
    """Return the part of ``tensor`` that ``cp_rank`` holds.

    Args:
        tensor: any shape with ``layout.seq_len`` entries along ``dim``.
        layout: where each block lives.
        cp_rank: the rank whose part is wanted.
        dim: the sequence dimension.

    Returns:
        A copy with ``layout.local_len`` entries along ``dim``, ordered as :func:`token_positions` says.

    Raises:
        ValueError: ``dim`` has another length than the sequence, or the layout no such rank.
    """
    check_layout(layout)
    if tensor.shape[dim] != layout.seq_len:
        raise invalid(f"tensor.shape[{dim}]", f"the layout's seq_len {layout.seq_len}", tensor.shape[dim])
    return tensor.index_select(dim, token_positions(layout, cp_rank=cp_rank).to(tensor.device))


def gather_sequence(parts: Sequence[Tensor], layout: SequenceLayout, *, dim: int) -> Tensor:
    """Gather every rank's part into one tensor: the inverse of :func:`shard_sequence`.

    Args:
        parts: in rank order, each with ``layout.local_len`` entries along ``dim``, of one dtype and device.
        layout: where each block lives.
        dim: the sequence dimension.

    Returns:
        A copy with ``layout.seq_len`` entries along ``dim``.

    Raises:
        ValueError: other than one part for each rank, or a part of another length.
    """
    check_layout(layout)
    if len(parts) != layout.cp_size:
        raise invalid("parts", f"one tensor for each of {layout.cp_size} ranks", f"{len(parts)} tensors")
    for rank, part in enumerate(parts):
        if part.shape[dim] != layout.local_len:
            raise invalid(f"parts[{rank}].shape[{dim}]", f"the layout's local_len {layout.local_len}", part.shape[dim])
    order = torch.cat([token_positions(layout, cp_rank=rank) for rank in range(layout.cp_size)])
    return torch.cat(list(parts), dim).index_select(dim, torch.argsort(order).to(parts[0].device))
