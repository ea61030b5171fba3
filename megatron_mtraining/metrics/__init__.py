"""Metrics: kept density, attention recall, balance over ranks and steps, useful FLOPs."""

from .attention_call import AttentionCall
from .density import causal_pairs, density, kept_pairs
from .flops import backward_flops, forward_flops, model_flops
from .imbalance import RingWork, rank_pairs, ring_work, work_of_pairs
from .list_pairs import computed_pairs_of_lists, pairs_by_owner
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
    "density",
    "forward_flops",
    "held_out_rows",
    "kept_pairs",
    "computed_pairs_of_lists",
    "model_flops",
    "pairs_by_owner",
    "rank_pairs",
    "ring_work",
    "work_of_pairs",
]
