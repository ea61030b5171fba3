"""One attention call of one layer: density of what it selected, and recall at chosen rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import SequenceLayout
from ..types import AttentionIndex, VerticalSlashIndex
from .density import density, triangle
from .list_pairs import computed_pairs_of_lists
from .recall import attention_recall
from .spans import spans_of


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of one layer, without gradients."""

    layer: int
    """Number of the layer, from 1."""

    query: Tensor
    """``[batch, seq, num_heads, head_dim]``, after rotary embedding."""

    key: Tensor
    """``[batch, seq, num_kv_heads, head_dim]``, likewise."""

    index: AttentionIndex | None
    """Keys that were selected; None where the layer attended densely."""

    softmax_scale: float | None

    cu_seqlens: Tensor | None
    """int32 bounds of packed documents and padding, on the CPU."""

    @property
    def density(self) -> Tensor:
        """float64 ``[num_lists]``: computed pairs as a share of the causal ones; ones where the layer is dense."""
        seq_len = self.query.shape[1]
        if self.index is None:
            return torch.ones(1, dtype=torch.float64, device=self.query.device)
        if isinstance(self.index, VerticalSlashIndex):
            return density(self.index, seq_len=seq_len, cu_seqlens=self.cu_seqlens)
        layout = SequenceLayout("striped", seq_len=seq_len, cp_size=1, block_size=self.index.block_size)
        pairs = computed_pairs_of_lists(self.index, layout, cp_rank=0, cu_seqlens=self.cu_seqlens)
        spans = spans_of(len(pairs), seq_len=seq_len, cu_seqlens=self.cu_seqlens)
        return pairs.sum(0).double() / sum(triangle(stop - start) for start, stop in spans)

    def recall(self, rows: Sequence[int]) -> Tensor:
        """``[num_heads, rows]``: share of dense attention on the selected keys, at some rows, mean over the batch."""
        if self.index is None:
            return torch.ones(self.query.shape[2], len(rows), device=self.query.device)
        return attention_recall(
            self.query,
            self.key,
            self.index,
            rows=rows,
            softmax_scale=self.softmax_scale,
            cu_seqlens=self.cu_seqlens,
        ).mean(0)
