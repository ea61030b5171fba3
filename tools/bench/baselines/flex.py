"""FlexAttention with the index as its mask: slashes and verticals in one block-sparse kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megatron_mtraining.types import VerticalSlashIndex

from ..problem import Inputs, Problem
from ..registry import Baseline, Bound, register
from .block_masks import SelectedTables, issued_pairs

LONGEST = 131072
"""Tokens up to which FlexAttention takes part: its calls are long beyond."""

MOST_COMPILATIONS = 256
"""Most compilations, one for each size, mask and mode; beyond torch's limit of 8 it would run uncompiled silently."""


@cache
def flex_on(device_type: str) -> Any:
    """Return ``flex_attention``, compiled where that gives a fused kernel."""
    if device_type != "cuda":
        return flex.flex_attention
    torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
    return torch.compile(flex.flex_attention, dynamic=False)


def lse_request() -> dict[str, Any]:
    """Return the arguments by which this torch is asked for the lse beside the output."""
    return {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}


def flex_unavailable(problem: Problem) -> str | None:
    """Return why FlexAttention is left out, or None."""
    if problem.device.type != "cuda":
        return "It has no backward on a CPU."
    return f"It takes part up to {LONGEST} tokens." if problem.seq_len > LONGEST else None


def _bind(problem: Problem, inputs: Inputs, index: VerticalSlashIndex) -> Bound:
    tables = SelectedTables(index.per_head(problem.num_heads), problem.seq_len)
    mask = tables.either_blocks()
    attention = flex_on(problem.device.type)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = attention(*heads_first, block_mask=mask, scale=problem.softmax_scale, enable_gqa=problem.group > 1)
        return out.transpose(1, 2)

    return Bound(attend=attend, leaves=(inputs.query, inputs.key, inputs.value), issued_pairs=issued_pairs(mask))


register(Baseline(name="flex-attention", is_dense=False, bind=_bind, unavailable=flex_unavailable))
