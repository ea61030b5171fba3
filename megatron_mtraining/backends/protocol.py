"""Operations of a backend, from which the ring is built.

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
    """Kernels over blocks.

    The pairs of an index fall into two disjoint sets. *Block pairs* are those of its distances or block lists; they
    need the current KV block. *Column pairs* are the rest of its columns; they need the packed rows of all ranks. A
    pair that is both counts as a block pair. An index without columns (``index.has_columns``) has block pairs only.

    A step hands its result to the next in the accumulate dtype, as ``previous``. With ``is_last`` the result, ``out``
    or the gradient of ``query``, is in the dtype of ``query``, rounded once.

    Callers have validated all arguments; ``softmax_scale`` is finite and positive.
    """

    name: str

    def pack(
        self, key: Tensor, value: Tensor, index: AttentionIndex, geometry: BlockGeometry
    ) -> Tensor | None:  # [2, R, L, V, D]
        """Copy the local rows of the index's columns; None for an index without columns. The host does not wait.

        Entry j of a list is the row at ``index.vertical[row, list, j]``. Padding, and rows that are not held here, are
        zero bits, so that the packs of all ranks join by
        :meth:`megatron_mtraining.transport.base.Transport.assemble`.
        """
        ...

    def unpack(
        self,
        grad_packed: Tensor,  # [2, R, L, V, D], in the accumulate dtype
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        grad_kv: Tensor,  # [2, B, Sk, Hkv, D], in the accumulate dtype, contiguous; may be overwritten
        dtype: torch.dtype,
    ) -> Tensor:  # [2, B, Sk, Hkv, D], in dtype
        """Add the gradients of packed rows to the rows that they were copied from: the transpose of :meth:`pack`.

        Entries of padding or of other ranks' rows are ignored. The sums are rounded once. The host does not wait.
        """
        ...

    def softmax_delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:  # [B, Hq, Sq]
        """Compute ``sum(grad_out * out, -1) - grad_lse``, which a row's probabilities subtract from their gradient.

        ``out`` is over all keys; ``grad_lse`` is None where ``lse`` was not used. Contiguous, in the accumulate dtype.
        """
        ...

    def forward(
        self,
        query: Tensor,  # [B, Sq, Hq, D]
        key: Tensor,  # [B, Sk, Hkv, D]
        value: Tensor,  # [B, Sk, Hkv, D]
        index: AttentionIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        packed: Tensor | None = None,  # [2, R, L, V, D]: row j of a list is the one at index.vertical[row, list, j]
        previous: AttentionOutput | None = None,  # in the accumulate dtype; may be overwritten
        is_last: bool,
    ) -> AttentionOutput:  # out [B, Sq, Hq, D]; lse [B, Hq, Sq] in the accumulate dtype
        """Merge ``previous`` with the block pairs of the given keys and, where ``packed`` is given, all column pairs.

        ``packed`` comes with the first step only, whose ``previous`` is None.
        """
        ...

    def backward(
        self,
        grad_out: Tensor,  # [B, Sq, Hq, D]
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lse: Tensor,  # [B, Hq, Sq], of the whole softmax
        delta: Tensor,  # [B, Hq, Sq]: sum(grad_out * out, -1) - grad_lse
        index: AttentionIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        packed: Tensor | None = None,
        previous: Tensor | None = None,  # gradient of query so far, in the accumulate dtype; may be overwritten
        is_last: bool,
        on_kv_gradients: Callable[[Tensor, Tensor | None], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the gradients of the pairs of :meth:`forward`.

        ``on_kv_gradients`` is called once with the second and the third result, as soon as their computation is
        launched: a backend computes them first, so that they travel while the gradient of ``query`` is computed. The
        callee may write to both.

        Returns:
            ``previous`` plus the gradient of ``query``; the gradients ``[2, B, Sk, Hkv, D]`` of the given keys and
            values; and those of ``packed``, or None. The latter two are contiguous, in the accumulate dtype.
        """
        ...
