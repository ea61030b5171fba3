"""The launchers of the compiled module as torch operators.

Each writes its results into tensors of the caller and returns nothing. The operators know tensors and numbers only, so
they trace under torch.compile; kernels/backend.py makes their arguments from an index and a geometry.

Legend: ``B`` batch, ``Sq`` and ``Sk`` local tokens, ``Hq`` and ``Hkv`` heads, ``D`` head_dim, ``R`` index rows, ``L``
lists, ``V`` packed rows. What a step leaves for the next one is float32; the last step writes ``final_*`` in the dtype
of ``query`` in its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C
from .params import (
    attention_params,
    current_stream,
    row_scalars,
    set_key_gradients,
    set_keys,
    set_packed,
    set_packed_gradients,
    set_results,
    set_statistics,
    set_tables,
)

# What each family launches, in this order, for vertical and slash pairs together.
_FORWARD = {
    "sm80": (_C.Operation.vertical_forward, _C.Operation.slash_forward),
    "sm90": (_C.Operation.forward,),
}
_BACKWARD = {
    "sm80": (_C.Operation.vertical_backward, _C.Operation.slash_backward),
    "sm90": (_C.Operation.backward,),
}


def families(device: torch.device) -> tuple[str, ...]:
    """The kernel families that were built and run on ``device``, the fastest first."""
    hopper = hasattr(_C, "sm90_launch") and torch.cuda.get_device_capability(device) == (9, 0)
    return ("sm90", "sm80") if hopper else ("sm80",)


@torch.library.custom_op("mtraining::forward", mutates_args=("out", "final_out", "lse"), device_types="cuda")
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
    """The vertical pairs and the slash pairs into ``lse`` and one of ``out`` and ``final_out``."""
    params = attention_params(query, softmax_scale, query_tiles)
    set_keys(params, key, value, key_slots)
    set_packed(params, packed, document_tiles)
    set_tables(params, vertical=vertical, num_vertical=num_vertical, slash=slash, num_slash=num_slash)
    params.lse = row_scalars(lse)
    _launch_passes(family, _FORWARD[family], params, query, "out", out, final_out)


@torch.library.custom_op("mtraining::slash_forward", mutates_args=("out", "final_out", "lse"), device_types="cuda")
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
    """The slash pairs merged with ``out`` and ``lse``, which hold garbage unless ``resume``, into ``lse`` and ``out``.

    Where there is a ``final_out``, the result goes there and ``out`` is only read.
    """
    params = attention_params(query, softmax_scale, query_tiles)
    set_keys(params, key, value, key_slots)
    set_tables(params, slash=slash, num_slash=num_slash)
    params.lse, params.resume = row_scalars(lse), resume
    set_results(params, out=out, final_out=final_out)
    launch(family, _C.Operation.slash_forward, params, query)


@torch.library.custom_op(
    "mtraining::backward",
    mutates_args=("grad_query", "final_grad_query", "grad_keys", "grad_packed"),
    device_types="cuda",
)
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
    """The gradients of the vertical pairs and of the slash pairs, that of ``query`` into one of its two tensors.

    Where both of these are None, or both others, only the pass over keys, or over queries, is made.
    """
    params = attention_params(query, softmax_scale, query_tiles)
    set_keys(params, key, value, key_slots)
    set_packed(params, packed, document_tiles)
    set_tables(params, vertical=vertical, num_vertical=num_vertical, slash=slash, num_slash=num_slash)
    set_statistics(params, grad_out, lse, delta)
    if grad_keys is not None:
        set_key_gradients(params, grad_keys, key_tiles, query_slots)
        set_packed_gradients(params, grad_packed)
    _launch_passes(family, _BACKWARD[family], params, query, "grad_query", grad_query, final_grad_query)


@torch.library.custom_op(
    "mtraining::slash_backward", mutates_args=("grad_query", "final_grad_query", "grad_keys"), device_types="cuda"
)
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
    """The gradients of the slash pairs, that of ``query`` added to ``grad_query``, which is garbage unless ``resume``.

    Where there is a ``final_grad_query``, the sum goes there and ``grad_query`` is only read. Passes: see ``backward``.
    """
    params = attention_params(query, softmax_scale, query_tiles)
    set_keys(params, key, value, key_slots)
    set_tables(params, slash=slash, num_slash=num_slash)
    set_statistics(params, grad_out, lse, delta)
    if grad_keys is not None:
        set_key_gradients(params, grad_keys, key_tiles, query_slots)
    params.resume = resume
    set_results(params, grad_query=grad_query, final_grad_query=final_grad_query)
    launch(family, _C.Operation.slash_backward, params, query)


def _nothing(*args: object) -> None:
    """What the operators do to fake tensors: the results keep shape and dtype."""


for _operator in (forward, slash_forward, backward, slash_backward):
    _operator.register_fake(_nothing)


def fill_words(params: _C.AttentionParams, query: Tensor) -> Tensor:
    """Makes the words that say which packed columns each query tile may use; the caller keeps them alive."""
    shape = (params.batch, params.num_lists, params.num_query_tiles, params.num_words)
    words = torch.empty(shape, dtype=torch.int64, device=query.device)
    params.vertical_words = words.data_ptr()
    with torch.cuda.device(query.device):
        _C.fill_vertical_words(params, current_stream(query.device))
    return words


def _launch_passes(
    family: str,
    operations: tuple[_C.Operation, ...],
    params: _C.AttentionParams,
    query: Tensor,
    result: str,
    partial: Tensor | None,
    final: Tensor | None,
) -> None:
    """Runs the passes over vertical and slash pairs, each from the one before; ``result`` is ``out`` or ``grad_query``.

    The last writes ``final`` where that is asked for. Passes before it then leave theirs in scratch.
    """
    words = fill_words(params, query)
    if partial is None and final is not None and len(operations) > 1:
        partial = torch.empty_like(final, dtype=torch.float32)
    for place, operation in enumerate(operations, start=1):
        is_last = place == len(operations)
        set_results(params, **{result: partial, f"final_{result}": final if is_last else None})
        launch(family, operation, params, query, keep=words)
        params.resume = True


def launch(
    family: str, operation: _C.Operation, params: _C.AttentionParams, query: Tensor, keep: Tensor | None = None
) -> None:
    """Runs an operation of a family on the current stream. ``keep`` only has to stay alive until the launch."""
    num_bytes = getattr(_C, f"{family}_workspace_bytes")(operation, params)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=query.device)
    params.workspace = workspace.data_ptr()
    with torch.cuda.device(query.device):
        getattr(_C, f"{family}_launch")(operation, params, current_stream(query.device))
