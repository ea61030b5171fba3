"""Layouts of the tokens: the rank and the slot of each block of the sequence. Integers only."""

from .sequence_layout import (
    SequenceLayout,
    blocks_of,
    check_layout,
    gather_sequence,
    shard_sequence,
    token_positions,
)

__all__ = ["SequenceLayout", "blocks_of", "check_layout", "gather_sequence", "shard_sequence", "token_positions"]
