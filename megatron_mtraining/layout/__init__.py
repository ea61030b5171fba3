"""WHERE tokens live: which rank holds which block of the sequence, and in which slot. Integers only."""

from .sequence_layout import SequenceLayout
from .shard import gather_sequence, shard_sequence, token_positions

__all__ = ["SequenceLayout", "gather_sequence", "shard_sequence", "token_positions"]
