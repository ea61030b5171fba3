"""Metrics: density, attention recall, balance over ranks and steps, useful FLOPs."""

from .attention_call import AttentionCall
from .density import causal_pairs, computed_pairs, density
from .flops import backward_flops, forward_flops, model_flops
from .imbalance import RingWork, rank_pairs, ring_work, work_of_pairs
from .list_pairs import computed_pairs_of_lists, pairs_by_owner, rank_lists
from .pair_counter import LayerPairs, PairCounter
from .recall import attention_recall, held_out_rows
from .recording import Recording

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
