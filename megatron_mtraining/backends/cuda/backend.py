"""Implementation of ``backends/protocol.py`` with the CUDA kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...errors import BackendUnavailableError, invalid
from ...types import AttentionIndex, AttentionOutput, VerticalSlashIndex
from ..geometry import BlockGeometry
from . import list_operators, operators, row_operators
from .geometry import device_geometry
from .params import aligned

FAMILIES = ("sm80", "sm90")


class CudaBackend:
    """Sparse attention on tensor cores: bfloat16 or float16, head_dim 64, 96 or 128, block_size 64.

    Sums are float32. Every result repeats bit for bit: each element is summed by one CTA, in a fixed order. Nothing
    waits for the device. Inputs may have any strides; one whose rows are not contiguous and 16-byte aligned is copied.
    """

    name = "cuda"

    def __init__(self, *, family: str | None = None) -> None:
        """Take the kernels of ``family``, of the environment variable MTRAINING_KERNELS, or the device's fastest.

        Raises:
            ValueError: there is no such family.
        """
        self._family = family or os.environ.get("MTRAINING_KERNELS") or None
        if self._family not in (None, *FAMILIES):
            raise invalid("MTRAINING_KERNELS", f"unset or one of {', '.join(FAMILIES)}", self._family)

    def pack(self, key: Tensor, value: Tensor, index: AttentionIndex, geometry: BlockGeometry) -> Tensor | None:
        """Pack as :class:`megatron_mtraining.backends.protocol.AttentionBackend` does; the bits of the reference."""
        if not index.has_columns:
            return None
        tables = device_geometry(geometry, key.device)
        return row_operators.pack_vertical(
            aligned(key), aligned(value), index.vertical, index.num_vertical, tables.key_slots, tables.document_tiles
        )

    def unpack(
        self,
        grad_packed: Tensor,
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        grad_kv: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Unpack as :class:`megatron_mtraining.backends.protocol.AttentionBackend` does; the bits of the reference."""
        key_tiles = device_geometry(geometry, grad_kv.device).key_tiles
        return row_operators.unpack_vertical_grad(
            grad_packed, index.vertical, index.num_vertical, key_tiles, grad_kv, dtype
        )

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
        """See :class:`megatron_mtraining.backends.protocol.AttentionBackend`. Columns come with the first step only."""
        tables, family = device_geometry(geometry, query.device), self.family_on(query.device)
        out, final_out = _partial_or_final(query, is_last, None if previous is None else previous.out)
        lse = _row_scalars(query) if previous is None else previous.lse.contiguous()
        given, results = (aligned(query), aligned(key), aligned(value)), (out, final_out, lse)
        if packed is not None:
            operators.forward(
                *given, packed, *index.tensors,
                tables.query_tiles, tables.document_tiles, tables.key_slots, *results, softmax_scale, family,
            )  # fmt: skip
        elif index.has_columns:
            operators.slash_forward(
                *given, index.slash, index.num_slash, tables.query_tiles, tables.key_slots, *results,
                softmax_scale, previous is not None, family,
            )  # fmt: skip
        else:
            list_operators.list_forward(
                *given, *index.tensors, tables.query_tiles, tables.key_slots, *results,
                index.chunk_blocks, tables.num_documents, softmax_scale, previous is not None, family,
            )  # fmt: skip
        return AttentionOutput(final_out if is_last else out, lse)

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
        """See :class:`megatron_mtraining.backends.protocol.AttentionBackend`. Columns come with the first step only."""
        tables, family = device_geometry(geometry, query.device), self.family_on(query.device)
        of_query = grad_query, final_grad_query = _partial_or_final(query, is_last, previous)
        grad_kv = key.new_empty((2, *key.shape), dtype=torch.float32)
        grad_packed = None if packed is None else torch.empty_like(packed, dtype=torch.float32)
        given = aligned(grad_out), aligned(query), aligned(key), aligned(value)
        maps = tables.query_tiles, tables.key_tiles, tables.query_slots, tables.key_slots
        resumes = previous is not None
        if packed is not None:
            maps = tables.query_tiles, tables.key_tiles, tables.document_tiles, tables.query_slots, tables.key_slots
            launch = partial(operators.backward, *given, packed, lse, delta, *index.tensors, *maps)
            options = softmax_scale, family
        elif index.has_columns:
            launch = partial(operators.slash_backward, *given, lse, delta, index.slash, index.num_slash, *maps)
            options = softmax_scale, resumes, family
        else:
            by_key = list_operators.key_lists(index, tables.query_tiles, num_blocks=geometry.num_blocks)
            launch = partial(list_operators.list_backward, *given, lse, delta, *index.tensors, *by_key, *maps)
            options = index.chunk_blocks, tables.num_documents, softmax_scale, resumes, family
        of_keys = (grad_kv,) if packed is None else (grad_kv, grad_packed)
        if on_kv_gradients is None:
            launch(*of_query, *of_keys, *options)
        else:  # the pass over keys, the caller's transfer, and the pass over queries
            launch(None, None, *of_keys, *options)
            on_kv_gradients(grad_kv, grad_packed)
            launch(*of_query, *(None for _ in of_keys), *options)
        return final_grad_query if is_last else grad_query, grad_kv, grad_packed

    def softmax_delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """See :class:`megatron_mtraining.backends.protocol.AttentionBackend`."""
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        return row_operators.softmax_delta(aligned(grad_out), aligned(out), grad_lse)

    def family_on(self, device: torch.device) -> str:
        """Return the family whose kernels run on ``device``.

        Raises:
            BackendUnavailableError: the one that was asked for cannot.
        """
        available = operators.families(device)
        if self._family is None:
            return available[0]
        if self._family not in available:
            raise BackendUnavailableError(
                f"MTRAINING_KERNELS={self._family} cannot run on {torch.cuda.get_device_name(device)}: "
                f"available here: {', '.join(available)}. Unset it, or set one of these."
            )
        return self._family


def _partial_or_final(
    query: Tensor, is_last: bool, previous: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors of an operator: the float32 result so far, and the result in the dtype of ``query``.

    The second is made in the last step. Before it, a step writes over ``previous``, or into fresh memory.
    """
    partial = None if previous is None else previous.contiguous()
    if is_last:
        return partial, query.new_empty(query.shape)
    return query.new_empty(query.shape, dtype=torch.float32) if partial is None else partial, None


def _row_scalars(query: Tensor) -> Tensor:
    """Uninitialised float32 ``[batch, heads, seq]``."""
    batch, seq_q, num_heads, _ = query.shape
    return query.new_empty((batch, num_heads, seq_q), dtype=torch.float32)
