"""Tokens of a sequence that a rank holds: the one answer that every replaced function of Megatron gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import SequenceLayout, token_positions
from ..tensors import kept_tensors, to_device


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Layout of every sequence of this process, whatever its length and whichever group holds it."""

    layout: str
    """Kind of :class:`megatron_mtraining.SequenceLayout`."""

    block_size: int
    """Tokens in a block."""

    node_size: int | None
    """Ranks in a node, for a layout that asks."""

    def __str__(self) -> str:
        nodes = "" if self.node_size is None else f" over nodes of {self.node_size}"
        return f"{self.layout} of {self.block_size}-token blocks{nodes}"

    def sequence(self, seq_len: int, cp_size: int) -> SequenceLayout:
        """Return the layout of a sequence, which says on which rank each block lives.

        Raises:
            ValueError: a length that the layout does not divide.
        """
        sizes = {"seq_len": seq_len, "cp_size": cp_size, "block_size": self.block_size, "node_size": self.node_size}
        return SequenceLayout(self.layout, **sizes)

    def positions(self, table_len: int, cp_group: Any, device: torch.device) -> Tensor:
        """Return the rows, int64 on ``device``, of a table of ``table_len`` positions that are this rank's tokens.

        YaRN also cuts a table of its original context length when it is built, which the layout need not divide; that
        table is cut as if it went on. Sequences of such a length are refused by the attention.
        """
        return _positions(self, table_len, cp_group.size(), cp_group.rank(), device)

    def rank_order(self, seq_len: int, cp_size: int, device: torch.device) -> Tensor:
        """Return int64 ``[seq_len]`` on ``device``: positions of all tokens, first rank first, each in its order."""
        return _orders(self.sequence(seq_len, cp_size), device)[0]

    def sequence_order(self, seq_len: int, cp_size: int, device: torch.device) -> Tensor:
        """Return int64 ``[seq_len]``, on ``device``: the place of each position in :meth:`rank_order`, its inverse."""
        return _orders(self.sequence(seq_len, cp_size), device)[1]

    def blocks_by_rank(self, seq_len: int, cp_size: int, device: torch.device) -> Tensor:
        """Return int64 ``[cp_size, num_local_blocks]``, on ``device``: each rank's blocks, ascending."""
        return _blocks_by_rank(self.sequence(seq_len, cp_size), device)


@kept_tensors(maxsize=16)  # every layer of a packed batch asks twice, for queries and for keys
def _positions(split: TokenSplit, table_len: int, cp_size: int, cp_rank: int, device: torch.device) -> Tensor:
    multiple = SequenceLayout.required_multiple(split.layout, cp_size=cp_size, block_size=split.block_size)
    sequence = split.sequence(-(-table_len // multiple) * multiple, cp_size)
    positions = token_positions(sequence, cp_rank=cp_rank)
    return to_device(positions[positions < table_len], device)


@kept_tensors(maxsize=4)
def _orders(sequence: SequenceLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    order = torch.cat([token_positions(sequence, cp_rank=rank) for rank in range(sequence.cp_size)])
    return to_device(order, device), to_device(torch.argsort(order), device)


@kept_tensors(maxsize=4)
def _blocks_by_rank(sequence: SequenceLayout, device: torch.device) -> Tensor:
    return to_device(sequence.blocks_by_rank(), device)
