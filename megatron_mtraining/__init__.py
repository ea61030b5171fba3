"""Dynamic sparse attention for ultra-long contexts on Megatron's context-parallel groups. Imports torch only."""

from .attention import select, sparse_attention
from .backends.merge import merge_partials
from .config import MTrainingConfig
from .layout import SequenceLayout, gather_sequence, shard_sequence, token_positions
from .transport import RingGroups
from .types import AttentionOutput, BlockListIndex, VerticalSlashIndex

__all__ = [
    "AttentionOutput",
    "BlockListIndex",
    "MTrainingConfig",
    "RingGroups",
    "SequenceLayout",
    "VerticalSlashIndex",
    "gather_sequence",
    "merge_partials",
    "select",
    "shard_sequence",
    "sparse_attention",
    "token_positions",
]
