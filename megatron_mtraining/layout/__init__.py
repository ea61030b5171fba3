"""WHERE tokens live: which rank holds which block of the sequence, and in which slot. Integers only."""

from .sequence_layout import SequenceLayout, check_layout
from .shard import gather_sequence, shard_sequence, token_positions

__all__ = ["SequenceLayout", "check_layout", "gather_sequence", "shard_sequence", "token_positions"]
