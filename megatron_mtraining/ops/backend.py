"""What a backend must compute: the operations from which one device and every ring are built.

Legend: ``B`` batch, ``Sq`` and ``Sk`` local tokens, ``Hq`` and ``Hkv`` heads, ``D`` head_dim, ``R`` index rows, ``V``
the width of ``index.vertical``. Accumulators are float32, or float64 for float64 input (``tensors.accumulate_dtype``).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..types import AttentionOutput, VerticalSlashIndex
from .geometry import BlockGeometry


class AttentionBackend(Protocol):
    """Kernels over blocks. A call begins with :meth:`forward`; a ring goes on with one ``slash_forward`` a step.

    Slash pairs and vertical pairs are disjoint: a pair that is both counts as a slash pair, and as nothing else. Slash
    pairs need the keys in hand, vertical pairs the packed rows, which hold the keys of all ranks.

    Nothing is checked again here: callers have, and ``softmax_scale`` is finite and positive.
    """

    name: str

    def pack_vertical(
        self, key: Tensor, value: Tensor, index: VerticalSlashIndex, geometry: BlockGeometry
    ) -> tuple[Tensor, Tensor]:  # [R, Hq, V, D]
        """See :func:`megatron_mtraining.ops.vertical.pack_vertical`."""
        ...

    def unpack_vertical_grad(
        self,
        grad_packed_key: Tensor,  # [R, Hq, V, D], accumulator
        grad_packed_value: Tensor,
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        grad_key: Tensor,  # [B, Sk, Hkv, D], accumulator, contiguous
        grad_value: Tensor,
    ) -> None:
        """See :func:`megatron_mtraining.ops.vertical.unpack_vertical_grad`."""
        ...

    def softmax_delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:  # [B, Hq, Sq]
        """See :func:`megatron_mtraining.ops.gradients.softmax_delta`."""
        ...

    def forward(
        self,
        query: Tensor,  # [B, Sq, Hq, D]
        key: Tensor,  # [B, Sk, Hkv, D]
        value: Tensor,  # [B, Sk, Hkv, D]
        packed_key: Tensor,  # [R, Hq, V, D]: row j of a head is the key at index.vertical[row, head, j]
        packed_value: Tensor,  # [R, Hq, V, D]
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
    ) -> AttentionOutput:  # out [B, Sq, Hq, D] and lse [B, Hq, Sq] in the accumulate dtype
        """Every vertical pair of the given queries, and the slash pairs between them and the given keys."""
        ...

    def slash_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        previous: AttentionOutput | None,  # in the accumulate dtype
    ) -> AttentionOutput:
        """``previous`` merged with the slash pairs between the given queries and keys. May overwrite ``previous``."""
        ...

    def backward(
        self,
        grad_out: Tensor,  # [B, Sq, Hq, D]
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed_key: Tensor,
        packed_value: Tensor,
        lse: Tensor,  # [B, Hq, Sq], of the whole softmax
        delta: Tensor,  # [B, Hq, Sq]: sum(grad_out * out, -1) - grad_lse
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        grad_query: Tensor,  # [B, Sq, Hq, D], accumulator
        grad_key: Tensor,  # [B, Sk, Hkv, D], accumulator
        grad_value: Tensor,  # [B, Sk, Hkv, D], accumulator
        grad_packed_key: Tensor,  # [R, Hq, V, D], accumulator
        grad_packed_value: Tensor,  # [R, Hq, V, D], accumulator
    ) -> None:
        """Adds the gradients of the pairs of :meth:`forward` to the five accumulators, in place."""
        ...

    def slash_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lse: Tensor,
        delta: Tensor,
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        grad_query: Tensor,
        grad_key: Tensor,
        grad_value: Tensor,
    ) -> None:
        """Adds the gradients of the pairs of :meth:`slash_forward` to the three accumulators, in place."""
        ...
