"""Dynamic sparse attention for ultra-long contexts on Megatron's context-parallel groups. Imports torch only."""

from .attention import vertical_slash_attention
from .backends.merge import merge_partials
from .config import MTrainingConfig
from .layout import SequenceLayout, gather_sequence, shard_sequence, token_positions
from .ring import ring_attention
from .selection import select_dense, select_index, select_moba, select_vertical_slash, select_xattention
from .types import BlockListIndex, VerticalSlashIndex

__all__ = [
    "BlockListIndex",
    "MTrainingConfig",
    "SequenceLayout",
    "VerticalSlashIndex",
    "gather_sequence",
    "merge_partials",
    "ring_attention",
    "select_dense",
    "select_index",
    "select_moba",
    "select_vertical_slash",
    "select_xattention",
    "shard_sequence",
    "token_positions",
    "vertical_slash_attention",
]
