"""Dense causal attention of the flash-attn-4 package (CuTe DSL)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from megatron_mtraining.types import VerticalSlashIndex

from ..problem import Inputs, Problem
from ..registry import Baseline, Bound, register


def _unavailable(problem: Problem) -> str | None:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "It is not installed (PyPI: flash-attn-4)."
    if problem.device.type != "cuda" or torch.cuda.get_device_capability(problem.device) < (9, 0):
        return "It needs a GPU of compute capability 9.0 or newer."
    return "It needs bf16 or fp16." if problem.dtype == torch.float32 else None


def _bind(problem: Problem, inputs: Inputs, index: VerticalSlashIndex) -> Bound:
    from flash_attn.cute import flash_attn_func

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = flash_attn_func(query, key, value, softmax_scale=problem.softmax_scale, causal=True)
        return result[0] if isinstance(result, tuple) else result

    return Bound(attend=attend, leaves=(inputs.query, inputs.key, inputs.value))


register(Baseline(name="flash-attn-4", is_dense=True, bind=_bind, unavailable=_unavailable))
