"""Layouts of the tokens: the rank and the slot of each block of the sequence. Integers only."""

from .sequence_layout import SequenceLayout, check_layout
from .shard import gather_sequence, shard_sequence, token_positions

__all__ = ["SequenceLayout", "check_layout", "gather_sequence", "shard_sequence", "token_positions"]
