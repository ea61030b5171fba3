"""Attention layer of one rank, as it is traced: selection, forward and backward of random tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...attention import select, sparse_attention
from ...config import MTrainingConfig
from ...layout import SequenceLayout
from ...metrics import PairCounter, attention_recall, held_out_rows
from ...metrics.indices import drawn_index
from ...transport import RingGroups
from ...transport.exposure import unexposed

RECALL_ROWS = 8
SELECTION = "mtraining selection"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a trace."""

    ranks: int
    as_part_of: int
    """Ranks of the ring whose first ranks are emulated by those present; 0: these are the ring."""

    inner_size: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: str
    schedule: str
    max_vertical: int
    max_slash: int
    steps: int
    out: Path

    @property
    def cp_size(self) -> int:
        """Ranks in the ring."""
        return self.as_part_of or self.ranks

    def token_layout(self) -> SequenceLayout:
        """Return the owner of each block.

        Raises:
            ValueError: the ranks do not divide the sequence.
        """
        return SequenceLayout(self.layout, seq_len=self.seq_len, cp_size=self.cp_size, node_size=self.inner_size)

    @property
    def ring_text(self) -> str:
        """Ring that the rank is one of, as text."""
        ring = f"{self.cp_size} ranks in nodes of {self.inner_size}, {self.schedule}, {self.seq_len} tokens"
        return f"{ring}, emulated on {self.ranks}" if self.as_part_of else ring


def do_nothing() -> None:
    """Do nothing."""


class Layer:
    """One rank's layer, whose caps decide the density.

    In a ring that is emulated the selection's contents have no meaning: the selected index is overwritten with a drawn
    one, the same on every rank.

    Args:
        options: what to trace.
        groups: of the ring.
        device: of the tensors.
    """

    def __init__(self, options: Options, groups: RingGroups, device: torch.device) -> None:
        self.config = MTrainingConfig.algorithm_1(
            layout=options.layout,
            schedule=options.schedule,
            max_vertical=options.max_vertical,
            max_slash=options.max_slash,
        )
        self.layout = options.token_layout()
        self.groups = groups
        self.ring: dict[str, Any] = {"layout": self.layout, "groups": groups}
        shape = (1, self.layout.local_len, options.num_heads, options.head_dim)
        kv_shape = (*shape[:2], options.num_kv_heads, options.head_dim)
        self.leaves = tuple(
            torch.randn(each, dtype=torch.bfloat16, device=device, requires_grad=True)
            for each in (shape, kv_shape, kv_shape)
        )
        self.grad_out = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self.rows = held_out_rows(self.config, seq_len=options.seq_len, count=RECALL_ROWS)
        self.observe: Callable[[], None] = do_nothing
        self._drawn = None
        if options.as_part_of:
            caps = {"max_vertical": options.max_vertical, "max_slash": options.max_slash}
            self._drawn = drawn_index(options.seq_len, num_heads=options.num_heads, **caps).to(device)

    def observed(self, counter: PairCounter, *, with_recall: bool) -> None:
        """Observe a call as the meter does."""
        query, key, _ = self.leaves
        seq_len, (num_heads, head_dim) = self.layout.seq_len, query.shape[2:]
        counter.add(1, self.index, seq_len=seq_len, num_heads=num_heads, head_dim=head_dim)
        if not with_recall:
            return
        with unexposed():
            attention_recall(query, key, self.index, rows=self.rows, layout=self.layout, groups=self.groups.cp)

    def step(self) -> None:
        """Run all of it."""
        with torch.profiler.record_function("mtraining step"):
            self.select()
            self.observe()
            self.attend()
            self.differentiate()

    def select(self) -> None:
        """Select the keys of each head."""
        query, key, _ = self.leaves
        with torch.profiler.record_function(SELECTION), torch.no_grad():
            self.index = select(query, key, self.config, **self.ring)
            if self._drawn is not None:
                for chosen, drawn in zip(self.index.tensors, self._drawn.tensors, strict=True):
                    chosen.copy_(drawn)

    def attend(self) -> None:
        """Run the forward."""
        with torch.profiler.record_function("mtraining forward"):
            self._out = sparse_attention(*self.leaves, self.config, index=self.index, **self.ring).out

    def differentiate(self) -> None:
        """Run the backward."""
        with torch.profiler.record_function("mtraining backward"):
            torch.autograd.grad(self._out, self.leaves, self.grad_out)
