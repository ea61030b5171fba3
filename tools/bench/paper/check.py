"""Check that a method's ring computes the attention that its index describes: on a few tokens, gradients too."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_mtraining import gather_sequence, select
from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    gradient_rounding,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import oracle_attention
from megatron_mtraining.transport import as_transport

from ..indices import dense_index
from ..problem import Inputs, Problem
from .layer import ParallelState, layer_of
from .methods import Method

SPARSE_WHEN_SHORT = {
    "sink_tokens": 16,
    "local_blocks": 1,
    "max_vertical": 32,
    "max_slash": 1,
    "moba_chunk": 64,
    "moba_top_k": 2,
    "xattention_block": 64,
    "xattention_threshold": 0.5,
}
"""Options with which a few blocks are not kept whole."""


def check_layer(method: Method, small: Problem, parallel: ParallelState) -> None:
    """Compare the whole result with a dense oracle in float64 on every rank. A collective.

    The index is that of one device: a selection is the same for every number of ranks.

    Raises:
        AssertionError: a result is farther from the exact one than twice the plain way in the same dtype.
    """
    if method.config is not None:
        method = replace(method, config=replace(method.config, **SPARSE_WHEN_SHORT))
    inputs = small.inputs()
    ours = _of_ranks(method, small, inputs, parallel)
    index = dense_index(small)
    if method.config is not None:
        index = select(inputs.query, inputs.key, method.config)
    exact, plain = (
        _of_one_device(attention, inputs, index, dtype)
        for attention, dtype in ((oracle_attention, torch.float64), (plain_attention, small.dtype))
    )
    rounding = gradient_rounding(inputs.query, inputs.key, inputs.value, grad_out=inputs.grad_out)
    assert_all_within_budget(ours, plain, exact, rounding=rounding, case=method.name)


def _of_ranks(method: Method, small: Problem, inputs: Inputs, parallel: ParallelState) -> dict[str, torch.Tensor]:
    layer = layer_of(method, small, inputs, parallel)
    out = layer.attend(layer.select())
    grads = torch.autograd.grad(out, layer.leaves, layer.grad_out)
    world = as_transport(dist.group.WORLD)
    parts = dict(zip(("out", "grad_query", "grad_key", "grad_value"), (out.detach(), *grads), strict=True))
    return {
        name: gather_sequence(world.all_gather(part.contiguous()).unbind(), layer.layout, dim=1)
        for name, part in parts.items()
    }


def _of_one_device(attention: object, inputs: Inputs, index: object, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    query, key, value, grad_out = (
        tensor.to(dtype) for tensor in (inputs.query, inputs.key, inputs.value, inputs.grad_out)
    )
    found = run_with_gradients(lambda *given: attention(*given, index), query, key, value, grad_out=grad_out)
    return {name: tensor for name, tensor in found.items() if name != "lse"}
