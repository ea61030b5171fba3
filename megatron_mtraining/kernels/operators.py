"""The launchers of the compiled module as torch operators.

Each changes its accumulators in place and returns nothing. The operators know tensors and numbers only, so they trace
under torch.compile; kernels/backend.py makes their arguments from an index and a geometry.

Legend: ``B`` batch, ``Sq`` and ``Sk`` local tokens, ``Hq`` and ``Hkv`` heads, ``D`` head_dim, ``R`` index rows, ``V``
packed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C
from .params import (
    attention_params,
    current_stream,
    packed_rows,
    set_gradients,
    set_key_gradients,
    set_keys,
    set_output,
    set_packed,
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


@torch.library.custom_op("mtraining::forward", mutates_args=("out", "lse"), device_types="cuda")
def forward(
    query: Tensor,  # [B, Sq, Hq, D]
    key: Tensor,  # [B, Sk, Hkv, D]
    value: Tensor,
    packed_key: Tensor,  # [R, Hq, V, D]
    packed_value: Tensor,
    vertical: Tensor,  # [R, Hq, V]
    num_vertical: Tensor,  # [R, Hq]
    slash: Tensor,  # [R, Hq, *]
    num_slash: Tensor,  # [R, Hq]
    query_tiles: Tensor,
    document_tiles: Tensor,
    key_slots: Tensor,
    out: Tensor,  # float32 [B, Sq, Hq, D]
    lse: Tensor,  # float32 [B, Hq, Sq]
    softmax_scale: float,
    family: str,
) -> None:
    """The vertical pairs and the slash pairs into ``out`` and ``lse``, which may hold anything before."""
    params = attention_params(query, softmax_scale, query_tiles)
    set_keys(params, key, value, key_slots)
    set_packed(params, packed_key, packed_value, document_tiles)
    set_tables(params, vertical=vertical, num_vertical=num_vertical, slash=slash, num_slash=num_slash)
    words = fill_words(params, query)
    for place, operation in enumerate(_FORWARD[family]):
        set_output(params, out, lse, resume=place > 0)
        _launch(family, operation, params, query, keep=words)


@torch.library.custom_op("mtraining::slash_forward", mutates_args=("out", "lse"), device_types="cuda")
def slash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slash: Tensor,
    num_slash: Tensor,
    query_tiles: Tensor,
    key_slots: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    resume: bool,
    family: str,
) -> None:
    """The slash pairs merged into ``out`` and ``lse``, which hold garbage unless ``resume``."""
    params = attention_params(query, softmax_scale, query_tiles)
    set_keys(params, key, value, key_slots)
    set_tables(params, slash=slash, num_slash=num_slash)
    set_output(params, out, lse, resume)
    _launch(family, _C.Operation.slash_forward, params, query)


@torch.library.custom_op(
    "mtraining::backward",
    mutates_args=("grad_query", "grad_key", "grad_value", "grad_packed_key", "grad_packed_value"),
    device_types="cuda",
)
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_key: Tensor,
    packed_value: Tensor,
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
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_packed_key: Tensor,
    grad_packed_value: Tensor,
    softmax_scale: float,
    family: str,
) -> None:
    """Adds the gradients of the vertical pairs and of the slash pairs to the five accumulators."""
    params = attention_params(query, softmax_scale, query_tiles)
    set_keys(params, key, value, key_slots)
    set_packed(params, packed_key, packed_value, document_tiles)
    set_tables(params, vertical=vertical, num_vertical=num_vertical, slash=slash, num_slash=num_slash)
    words = fill_words(params, query)
    set_gradients(params, grad_out, lse, delta, grad_query)
    set_key_gradients(params, grad_key, grad_value, key_tiles, query_slots)
    params.grad_packed_key, params.grad_packed_value = packed_rows(grad_packed_key), packed_rows(grad_packed_value)
    for operation in _BACKWARD[family]:
        _launch(family, operation, params, query, keep=words)


@torch.library.custom_op(
    "mtraining::slash_backward", mutates_args=("grad_query", "grad_key", "grad_value"), device_types="cuda"
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
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    softmax_scale: float,
    family: str,
) -> None:
    """Adds the gradients of the slash pairs to the three accumulators."""
    params = attention_params(query, softmax_scale, query_tiles)
    set_keys(params, key, value, key_slots)
    set_tables(params, slash=slash, num_slash=num_slash)
    set_gradients(params, grad_out, lse, delta, grad_query)
    set_key_gradients(params, grad_key, grad_value, key_tiles, query_slots)
    _launch(family, _C.Operation.slash_backward, params, query)


def _nothing(*args: object) -> None:
    """What the operators do to fake tensors: the accumulators keep shape and dtype."""


for _operator in (forward, slash_forward, backward, slash_backward):
    _operator.register_fake(_nothing)


def fill_words(params: _C.AttentionParams, query: Tensor) -> Tensor:
    """Makes the words that say which packed columns each query tile may use; the caller keeps them alive."""
    shape = (params.batch, params.num_heads, params.num_query_tiles, params.num_words)
    words = torch.empty(shape, dtype=torch.int64, device=query.device)
    params.vertical_words = words.data_ptr()
    with torch.cuda.device(query.device):
        _C.fill_vertical_words(params, current_stream(query.device))
    return words


def _launch(
    family: str, operation: _C.Operation, params: _C.AttentionParams, query: Tensor, keep: Tensor | None = None
) -> None:
    """Runs an operation on the current stream. ``keep`` only has to stay alive until the launch."""
    num_bytes = getattr(_C, f"{family}_workspace_bytes")(operation, params)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=query.device)
    params.workspace = workspace.data_ptr()
    with torch.cuda.device(query.device):
        getattr(_C, f"{family}_launch")(operation, params, current_stream(query.device))
