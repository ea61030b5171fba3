"""What a backend must compute: the operations from which one device and every ring are built.

Legend: ``B`` batch, ``Sq`` and ``Sk`` local tokens, ``Hq`` and ``Hkv`` heads, ``D`` head_dim, ``R`` index rows, ``L``
lists in each, one for a query head or one for a key/value head, ``V`` the width of ``index.vertical``. The accumulate
dtype is float32, or float64 for float64 input (``tensors.accumulate_dtype``). A leading 2 stands for key and value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..types import AttentionIndex, AttentionOutput, VerticalSlashIndex
from .geometry import BlockGeometry


class AttentionBackend(Protocol):
    """Kernels over blocks. A call begins with :meth:`forward`; a ring goes on with one ``slash_forward`` a step.

    Slash pairs and vertical pairs are disjoint: a pair that is both counts as a slash pair, and as nothing else. Slash
    pairs need the keys in hand, vertical pairs the packed rows, which hold the keys of all ranks. A ``BlockListIndex``
    has no vertical pairs: all of its steps are :meth:`slash_forward`, where "slash pairs" are those of its lists.

    A step hands its result to the next in the accumulate dtype. ``is_last`` says that none follows: then ``out``, or
    ``grad_query``, comes in the dtype of ``query``, rounded once.

    Nothing is checked again here: callers have, and ``softmax_scale`` is finite and positive.
    """

    name: str

    def pack_vertical(
        self, key: Tensor, value: Tensor, index: VerticalSlashIndex, geometry: BlockGeometry
    ) -> Tensor:  # [2, R, L, V, D]
        """See :func:`megatron_mtraining.backends.reference.vertical.pack_vertical`."""
        ...

    def unpack_vertical_grad(
        self,
        grad_packed: Tensor,  # [2, R, L, V, D], in the accumulate dtype
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        grad_keys: Tensor,  # [2, B, Sk, Hkv, D], in the accumulate dtype, contiguous
        dtype: torch.dtype,
    ) -> Tensor:  # [2, B, Sk, Hkv, D], in dtype
        """See :func:`megatron_mtraining.backends.reference.vertical.unpack_vertical_grad`."""
        ...

    def softmax_delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:  # [B, Hq, Sq]
        """See :func:`megatron_mtraining.backends.gradients.softmax_delta`."""
        ...

    def forward(
        self,
        query: Tensor,  # [B, Sq, Hq, D]
        key: Tensor,  # [B, Sk, Hkv, D]
        value: Tensor,  # [B, Sk, Hkv, D]
        packed: Tensor,  # [2, R, L, V, D]: row j of a list is the one at index.vertical[row, list, j]
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        is_last: bool,
    ) -> AttentionOutput:  # out [B, Sq, Hq, D]; lse [B, Hq, Sq] in the accumulate dtype
        """Every vertical pair of the given queries, and the slash pairs between them and the given keys."""
        ...

    def slash_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: AttentionIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        previous: AttentionOutput | None,  # in the accumulate dtype
        is_last: bool,
    ) -> AttentionOutput:
        """``previous`` merged with the slash pairs between the given queries and keys. May overwrite ``previous``."""
        ...

    def backward(
        self,
        grad_out: Tensor,  # [B, Sq, Hq, D]
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: Tensor,
        lse: Tensor,  # [B, Hq, Sq], of the whole softmax
        delta: Tensor,  # [B, Hq, Sq]: sum(grad_out * out, -1) - grad_lse
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        is_last: bool,
        on_key_gradients: Callable[[Tensor, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the pairs of :meth:`forward`.

        ``on_key_gradients`` is called once with the second and the third of them, as soon as what makes these is on its
        way: a backend that can makes them first, so that they travel while it makes that of ``query``. What it is given
        it may write to.

        Returns:
            That of ``query``; ``[2, B, Sk, Hkv, D]``, that of the given keys and values, and ``[2, R, L, V, D]``, that
            of ``packed``, both in the accumulate dtype and contiguous.
        """
        ...

    def slash_backward(
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
        previous: Tensor | None,  # gradient of query so far, in the accumulate dtype
        is_last: bool,
        on_key_gradients: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the pairs of :meth:`slash_forward`; ``on_key_gradients`` as there, with the second.

        Returns:
            ``previous`` plus that of ``query``, perhaps in the memory of ``previous``; and ``[2, B, Sk, Hkv, D]``, that
            of the given keys and values alone, in the accumulate dtype and contiguous.
        """
        ...
