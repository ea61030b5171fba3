"""Metrics: density, attention recall, balance over ranks and steps, useful FLOPs."""

from .density import backward_flops, causal_pairs, computed_pairs, density, forward_flops, model_flops
from .imbalance import RingWork, rank_pairs, ring_work, work_of_pairs
from .indices import Recording
from .list_pairs import computed_pairs_of_lists, pairs_by_owner, rank_lists
from .pair_counter import LayerPairs, PairCounter
from .recall import AttentionCall, attention_recall, held_out_rows

__all__ = [
    "AttentionCall",
    "LayerPairs",
    "PairCounter",
    "Recording",
    "RingWork",
    "attention_recall",
    "backward_flops",
    "causal_pairs",
    "computed_pairs",
    "computed_pairs_of_lists",
    "density",
    "forward_flops",
    "held_out_rows",
    "model_flops",
    "pairs_by_owner",
    "rank_lists",
    "rank_pairs",
    "ring_work",
    "work_of_pairs",
]
