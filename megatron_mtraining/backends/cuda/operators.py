"""The launchers of the compiled module as torch operators.

Each writes its results into tensors of the caller and returns nothing. The operators' arguments are tensors and
numbers only, so they trace under torch.compile; backends/cuda/backend.py makes them from an index and a geometry.

Legend: ``B`` batch, ``Sq`` and ``Sk`` local tokens, ``Hq`` and ``Hkv`` heads, ``D`` head_dim, ``R`` index rows, ``L``
lists, ``V`` packed rows. Partial results of a step are float32; the last step writes ``final_*`` in the dtype of
``query`` instead.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import _C
from .params import current_stream, num_column_tiles, of_key_gradients, of_keys, of_packed, of_query, of_tables
from .registration import operator

# The launches of each family, in order, for vertical and slash pairs together.
_FORWARD = {
    "sm80": (_C.Operation.vertical_forward, _C.Operation.slash_forward),
    "sm90": (_C.Operation.forward,),
}
_BACKWARD = {
    "sm80": (_C.Operation.vertical_backward, _C.Operation.slash_backward),
    "sm90": (_C.Operation.backward,),
}


@functools.cache  # called by every launch
def families(device: torch.device) -> tuple[str, ...]:
    """Return the kernel families that were built and run on ``device``, the fastest first."""
    hopper = hasattr(_C, "sm90_launch") and torch.cuda.get_device_capability(device) == (9, 0)
    return ("sm90", "sm80") if hopper else ("sm80",)


@operator(mutates_args=("out", "final_out", "lse"))
def forward(
    query: Tensor,  # [B, Sq, Hq, D]
    key: Tensor,  # [B, Sk, Hkv, D]
    value: Tensor,
    packed: Tensor,  # [2, R, L, V, D]: of key, of value
    vertical: Tensor,  # [R, L, V]
    num_vertical: Tensor,  # [R, L]
    slash: Tensor,  # [R, L, *]
    num_slash: Tensor,  # [R, L]
    query_tiles: Tensor,
    document_tiles: Tensor,
    key_slots: Tensor,
    out: Tensor | None,  # float32 [B, Sq, Hq, D]
    final_out: Tensor | None,
    lse: Tensor,  # float32 [B, Hq, Sq]
    softmax_scale: float,
    family: str,
) -> None:
    """Compute the vertical pairs and the slash pairs into ``lse`` and one of ``out`` and ``final_out``."""
    params = _C.AttentionParams(
        **of_query(query, query_tiles, softmax_scale),
        **of_keys(key, value, key_slots),
        **of_packed(packed, document_tiles),
        **of_tables(query.shape[0], vertical=vertical, num_vertical=num_vertical, slash=slash, num_slash=num_slash),
        vertical_bitmask=empty_bitmask(query, vertical, query_tiles),
        lse=lse,
    )
    _launch_passes(family, _FORWARD[family], params, query.device, "out", out, final_out)


@operator(mutates_args=("out", "final_out", "lse"))
def slash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slash: Tensor,
    num_slash: Tensor,
    query_tiles: Tensor,
    key_slots: Tensor,
    out: Tensor | None,
    final_out: Tensor | None,
    lse: Tensor,
    softmax_scale: float,
    resume: bool,
    family: str,
) -> None:
    """Merge the slash pairs with ``out`` and ``lse``, uninitialized unless ``resume``, into ``lse`` and ``out``.

    With a ``final_out``, the result is written there and ``out`` is only read.
    """
    params = _C.AttentionParams(
        **of_query(query, query_tiles, softmax_scale),
        **of_keys(key, value, key_slots),
        **of_tables(query.shape[0], slash=slash, num_slash=num_slash),
        out=out,
        final_out=final_out,
        lse=lse,
        resume=resume,
    )
    launch(family, _C.Operation.slash_forward, params, query.device)


@operator(mutates_args=("grad_query", "final_grad_query", "grad_keys", "grad_packed"))
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    lse: Tensor,
    delta: Tensor,
    vertical: Tensor,
    num_vertical: Tensor,
    slash: Tensor,
    num_slash: Tensor,
    query_tiles: Tensor,
    key_tiles: Tensor,
    document_tiles: Tensor,
    query_slots: Tensor,
    key_slots: Tensor,
    grad_query: Tensor | None,  # float32 [B, Sq, Hq, D]
    final_grad_query: Tensor | None,
    grad_keys: Tensor | None,  # float32 [2, B, Sk, Hkv, D]: of key, of value
    grad_packed: Tensor | None,  # float32 [2, R, L, V, D]
    softmax_scale: float,
    family: str,
) -> None:
    """Compute the gradients of the vertical and slash pairs, that of ``query`` into one of its two tensors.

    Where both of these are None, only the pass over keys is made; where both others are, only the pass over queries.
    """
    params = _C.AttentionParams(
        **of_query(query, query_tiles, softmax_scale),
        **of_keys(key, value, key_slots),
        **of_packed(packed, document_tiles),
        **of_tables(query.shape[0], vertical=vertical, num_vertical=num_vertical, slash=slash, num_slash=num_slash),
        **of_key_gradients(grad_keys, key_tiles, query_slots),
        vertical_bitmask=empty_bitmask(query, vertical, query_tiles),
        grad_packed=grad_packed,
        grad_out=grad_out,
        lse=lse,
        delta=delta,
    )
    _launch_passes(family, _BACKWARD[family], params, query.device, "grad_query", grad_query, final_grad_query)


@operator(mutates_args=("grad_query", "final_grad_query", "grad_keys"))
def slash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    slash: Tensor,
    num_slash: Tensor,
    query_tiles: Tensor,
    key_tiles: Tensor,
    query_slots: Tensor,
    key_slots: Tensor,
    grad_query: Tensor | None,
    final_grad_query: Tensor | None,
    grad_keys: Tensor | None,
    softmax_scale: float,
    resume: bool,
    family: str,
) -> None:
    """Compute the gradients of the slash pairs; ``grad_query`` is uninitialized unless ``resume``.

    With a ``final_grad_query``, the sum is written there and ``grad_query`` is only read. Passes: see ``backward``.
    """
    params = _C.AttentionParams(
        **of_query(query, query_tiles, softmax_scale),
        **of_keys(key, value, key_slots),
        **of_tables(query.shape[0], slash=slash, num_slash=num_slash),
        **of_key_gradients(grad_keys, key_tiles, query_slots),
        grad_out=grad_out,
        lse=lse,
        delta=delta,
        grad_query=grad_query,
        final_grad_query=final_grad_query,
        resume=resume,
    )
    launch(family, _C.Operation.slash_backward, params, query.device)


def empty_bitmask(query: Tensor, vertical: Tensor, query_tiles: Tensor) -> Tensor:
    """Allocate the vertical bitmask: the packed columns that each query tile attends to."""
    shape = (query.shape[0], vertical.shape[1], query_tiles.shape[0], num_column_tiles(vertical.shape[2]))
    return torch.empty(shape, dtype=torch.int64, device=query.device)


def launch(family: str, operation: _C.Operation, params: _C.AttentionParams, device: torch.device) -> None:
    """Run an operation of a family on the current stream."""
    with torch.cuda.device(device.index):
        _launch(family, operation, params, device, current_stream(device.index))


def _launch_passes(
    family: str,
    operations: tuple[_C.Operation, ...],
    params: _C.AttentionParams,
    device: torch.device,
    result: str,
    partial: Tensor | None,
    final: Tensor | None,
) -> None:
    """Run the passes over vertical and slash pairs, each continuing the one before.

    ``result`` is ``out`` or ``grad_query``. The last pass writes ``final`` if there is one; then the passes before it
    write to scratch.
    """
    if partial is None and final is not None and len(operations) > 1:
        partial = torch.empty_like(final, dtype=torch.float32)
    with torch.cuda.device(device.index):
        stream = current_stream(device.index)
        _C.fill_vertical_bitmask(params, stream)
        for number, operation in enumerate(operations, start=1):
            is_last = number == len(operations)
            results = {result: partial, f"final_{result}": final if is_last else None}
            params.set(**results, resume=number > 1, workspace=None)  # the last pass's workspace is free again
            _launch(family, operation, params, device, stream)


def _launch(
    family: str, operation: _C.Operation, params: _C.AttentionParams, device: torch.device, stream: int
) -> None:
    num_bytes = getattr(_C, f"{family}_workspace_bytes")(operation, params)
    params.set(workspace=torch.empty(num_bytes, dtype=torch.uint8, device=device))
    getattr(_C, f"{family}_launch")(operation, params, stream)
