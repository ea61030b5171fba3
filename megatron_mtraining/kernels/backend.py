"""The operations of ``ops/backend.py`` on the CUDA kernels."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import BackendUnavailableError, invalid
from ..ops.geometry import BlockGeometry
from ..types import AttentionIndex, AttentionOutput, BlockListIndex, VerticalSlashIndex
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
        """Takes the kernels of ``family``, of the environment variable MTRAINING_KERNELS, or the device's fastest.

        Raises:
            ValueError: there is no such family.
        """
        self._family = family or os.environ.get("MTRAINING_KERNELS") or None
        if self._family not in (None, *FAMILIES):
            raise invalid("MTRAINING_KERNELS", f"unset or one of {', '.join(FAMILIES)}", self._family)

    def pack_vertical(self, key: Tensor, value: Tensor, index: VerticalSlashIndex, geometry: BlockGeometry) -> Tensor:
        """See :func:`megatron_mtraining.ops.vertical.pack_vertical`: the same bits."""
        tables = device_geometry(geometry, key.device)
        return row_operators.pack_vertical(
            aligned(key), aligned(value), index.vertical, index.num_vertical, tables.key_slots, tables.document_tiles
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: Tensor,
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        is_last: bool,
    ) -> AttentionOutput:
        """See :class:`megatron_mtraining.ops.backend.AttentionBackend`."""
        tables = device_geometry(geometry, query.device)
        out, final_out = _partial_or_final(query, is_last)
        lse = _row_scalars(query)
        operators.forward(
            aligned(query), aligned(key), aligned(value), packed,
            index.vertical, index.num_vertical, index.slash, index.num_slash,
            tables.query_tiles, tables.document_tiles, tables.key_slots, out, final_out, lse,
            softmax_scale, self.family_on(query.device),
        )  # fmt: skip
        return AttentionOutput(final_out if is_last else out, lse)

    def slash_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: AttentionIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        previous: AttentionOutput | None,
        is_last: bool,
    ) -> AttentionOutput:
        """See :class:`megatron_mtraining.ops.backend.AttentionBackend`."""
        tables = device_geometry(geometry, query.device)
        out, final_out = _partial_or_final(query, is_last, None if previous is None else previous.out)
        lse = _row_scalars(query) if previous is None else previous.lse.contiguous()
        given, resume = (aligned(query), aligned(key), aligned(value)), previous is not None
        geometry_and_results = (tables.query_tiles, tables.key_slots, out, final_out, lse)
        if isinstance(index, BlockListIndex):
            list_operators.list_forward(
                *given, *index.tensors, *geometry_and_results, index.chunk_blocks, tables.num_documents,
                softmax_scale, resume, self.family_on(query.device),
            )  # fmt: skip
        else:
            operators.slash_forward(
                *given, index.slash, index.num_slash, *geometry_and_results,
                softmax_scale, resume, self.family_on(query.device),
            )  # fmt: skip
        return AttentionOutput(final_out if is_last else out, lse)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: Tensor,
        lse: Tensor,
        delta: Tensor,
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        softmax_scale: float,
        is_last: bool,
        on_key_gradients: Callable[..., None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`megatron_mtraining.ops.backend.AttentionBackend`."""
        tables = device_geometry(geometry, query.device)
        of_query = grad_query, final_grad_query = _partial_or_final(query, is_last)
        grad_keys = key.new_empty((2, *key.shape), dtype=torch.float32)
        grad_packed = torch.empty_like(packed, dtype=torch.float32)
        given = (aligned(grad_out), aligned(query), aligned(key), aligned(value), packed, lse, delta, *index.tensors)
        maps = (tables.query_tiles, tables.key_tiles, tables.document_tiles, tables.query_slots, tables.key_slots)

        def launch(*results: Tensor | None) -> None:
            operators.backward(*given, *maps, *results, softmax_scale, self.family_on(query.device))

        _launch_backward(launch, of_query, (grad_keys, grad_packed), on_key_gradients)
        return final_grad_query if is_last else grad_query, grad_keys, grad_packed

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
        previous: Tensor | None,
        is_last: bool,
        on_key_gradients: Callable[..., None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`megatron_mtraining.ops.backend.AttentionBackend`."""
        tables = device_geometry(geometry, query.device)
        of_query = grad_query, final_grad_query = _partial_or_final(query, is_last, previous)
        grad_keys = key.new_empty((2, *key.shape), dtype=torch.float32)
        given = (aligned(grad_out), aligned(query), aligned(key), aligned(value), lse, delta)
        maps = (tables.query_tiles, tables.key_tiles, tables.query_slots, tables.key_slots)
        options = (softmax_scale, previous is not None, self.family_on(query.device))

        if isinstance(index, BlockListIndex):
            by_key = list_operators.key_lists(index, tables.query_tiles, num_blocks=geometry.num_blocks)
            operator, lists = list_operators.list_backward, (*index.tensors, *by_key)
            options = (index.chunk_blocks, tables.num_documents, *options)
        else:
            operator, lists = operators.slash_backward, (index.slash, index.num_slash)

        def launch(*results: Tensor | None) -> None:
            operator(*given, *lists, *maps, *results, *options)

        _launch_backward(launch, of_query, (grad_keys,), on_key_gradients)
        return final_grad_query if is_last else grad_query, grad_keys

    def unpack_vertical_grad(
        self,
        grad_packed: Tensor,
        index: VerticalSlashIndex,
        geometry: BlockGeometry,
        *,
        grad_keys: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """See :func:`megatron_mtraining.ops.vertical.unpack_vertical_grad`: the same bits."""
        key_tiles = device_geometry(geometry, grad_keys.device).key_tiles
        return row_operators.unpack_vertical_grad(
            grad_packed, index.vertical, index.num_vertical, key_tiles, grad_keys, dtype
        )

    def softmax_delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """See :func:`megatron_mtraining.ops.gradients.softmax_delta`."""
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        return row_operators.softmax_delta(aligned(grad_out), aligned(out), grad_lse)

    def family_on(self, device: torch.device) -> str:
        """The family whose kernels run on ``device``.

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


def _launch_backward(
    launch: Callable[..., None],
    of_query: tuple[Tensor | None, Tensor | None],
    of_keys: tuple[Tensor, ...],
    on_key_gradients: Callable[..., None] | None,
) -> None:
    """Both passes in one launch; or the one over keys, the caller's turn, and the one over queries."""
    if on_key_gradients is None:
        launch(*of_query, *of_keys)
        return
    launch(*(None for _ in of_query), *of_keys)
    on_key_gradients(*of_keys)
    launch(*of_query, *(None for _ in of_keys))


def _partial_or_final(
    query: Tensor, is_last: bool, previous: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """What an operator reads and writes: the float32 result so far, and the result in the dtype of ``query``.

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
