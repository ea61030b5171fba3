"""The strongest composition of public parts: verticals packed side by side, slashes block-sparse, merged by lse."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mtraining import merge_partials
from megatron_mtraining.types import AttentionOutput, VerticalSlashIndex

from ..problem import Inputs, Problem
from ..registry import Baseline, Bound, register
from .block_masks import SelectedTables, issued_pairs
from .flex import flex_on, flex_unavailable, lse_request


def _bind(problem: Problem, inputs: Inputs, index: VerticalSlashIndex) -> Bound:
    """Bind both parts on FlexAttention, which returns a differentiable lse; packing is a gather that autograd knows."""
    tables = SelectedTables(index.per_head(problem.num_heads), problem.seq_len)
    vertical_mask, slash_mask = tables.packed_blocks(), tables.slash_blocks()
    attention = flex_on(problem.device.type)
    row = torch.arange(problem.batch, device=problem.device)[:, None, None]
    column = tables.position.clamp(max=problem.seq_len - 1)
    kv_head = torch.arange(problem.num_heads, device=problem.device)[:, None] // problem.group

    def part(query: Tensor, key: Tensor, value: Tensor, mask: object) -> AttentionOutput:
        is_shared = query.shape[1] != key.shape[1]
        out, second = attention(
            query, key, value, block_mask=mask, scale=problem.softmax_scale, enable_gqa=is_shared, **lse_request()
        )
        return AttentionOutput(out.transpose(1, 2), getattr(second, "lse", second))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        packed = (tensor[row, column, kv_head] for tensor in (key, value))
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        vertical = part(query, *packed, vertical_mask)
        return merge_partials(vertical, part(query, key, value, slash_mask)).out

    issued = issued_pairs(vertical_mask) + issued_pairs(slash_mask)
    return Bound(attend=attend, leaves=(inputs.query, inputs.key, inputs.value), issued_pairs=issued)


register(Baseline(name="composite-flex", is_dense=False, bind=_bind, unavailable=flex_unavailable))
