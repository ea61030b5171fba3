"""Dense causal attention of TransformerEngine on one GPU: the one that its context parallelism runs on chunks."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from megatron_mtraining.types import VerticalSlashIndex

from ..problem import Inputs, Problem
from ..registry import Baseline, Bound, register


def _unavailable(problem: Problem) -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "It is not installed (PyPI: transformer-engine[pytorch])."
    if problem.device.type != "cuda":
        return "It needs a GPU."
    return "It needs bf16 or fp16." if problem.dtype == torch.float32 else None


def causal_attention(problem: Problem, **ring: Any) -> torch.nn.Module:
    """Compute its dense causal attention for ``[batch, seq, heads, head_dim]``; ``ring``: its own arguments of a group.

    Never the one that writes out scores of tokens x tokens: where it has no better one, its call raises.
    """
    os.environ["NVTE_UNFUSED_ATTN"] = "0"  # read at each call
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        problem.num_heads,
        problem.head_dim,
        num_gqa_groups=problem.num_kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
        softmax_scale=problem.softmax_scale,
        **ring,
    )


def _bind(problem: Problem, inputs: Inputs, index: VerticalSlashIndex) -> Bound:
    module = causal_attention(problem)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return module(query, key, value).view(query.shape)

    leaves = (inputs.query, inputs.key, inputs.value)
    return Bound(attend=attend, leaves=leaves, retains_graph=False)  # its backward drops what its forward had kept


register(Baseline(name="transformer-engine", is_dense=True, bind=_bind, unavailable=_unavailable))
