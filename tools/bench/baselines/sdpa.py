"""Dense causal attention of torch.nn.functional.scaled_dot_product_attention: cuDNN and FlashAttention-2."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron_mtraining.types import VerticalSlashIndex

from ..problem import Inputs, Problem
from ..registry import Baseline, Bound, register


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, backend: SDPBackend, softmax_scale: float, enable_gqa: bool
) -> Tensor:
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*heads_first, is_causal=True, scale=softmax_scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


def _shares_kv_heads(problem: Problem, backend: SDPBackend) -> bool:
    """Return whether the backend takes fewer key/value than query heads, tried on a few tokens forward and backward."""
    shape = (problem.batch, 128)
    few = [
        torch.zeros(*shape, heads, problem.head_dim, dtype=problem.dtype, device=problem.device, requires_grad=True)
        for heads in (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads)
    ]
    try:
        _attend(*few, backend=backend, softmax_scale=problem.softmax_scale, enable_gqa=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _bind(problem: Problem, inputs: Inputs, index: VerticalSlashIndex, *, backend: SDPBackend) -> Bound:
    """Bind a backend; for one that cannot share key and value heads, repeat them outside of the timed part."""
    shares = problem.group > 1 and _shares_kv_heads(problem, backend)
    repeats = 1 if shares else problem.group
    key, value = (
        tensor.repeat_interleave(repeats, dim=2) if repeats > 1 else tensor for tensor in (inputs.key, inputs.value)
    )
    attend = partial(_attend, backend=backend, softmax_scale=problem.softmax_scale, enable_gqa=shares)
    return Bound(attend=attend, leaves=(inputs.query, key, value))


def _needs_gpu(problem: Problem) -> str | None:
    if problem.device.type != "cuda":
        return "It needs a GPU."
    return "It needs bf16 or fp16." if problem.dtype == torch.float32 else None


def _flash_unavailable(problem: Problem) -> str | None:
    return None if problem.device.type == "cpu" else _needs_gpu(problem)


register(
    Baseline(
        name="cudnn",
        is_dense=True,
        bind=partial(_bind, backend=SDPBackend.CUDNN_ATTENTION),
        unavailable=_needs_gpu,
    )
)
register(
    Baseline(
        name="flash-attention-2",
        is_dense=True,
        bind=partial(_bind, backend=SDPBackend.FLASH_ATTENTION),
        unavailable=_flash_unavailable,
    )
)
