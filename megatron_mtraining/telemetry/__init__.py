"""HOW WELL it does: kept density, attention recall, balance over ranks and steps, useful FLOPs."""

from .density import causal_pairs, density, kept_pairs
from .flops import backward_flops, forward_flops
from .imbalance import RingWork, ring_work
from .recall import attention_recall, held_out_rows

__all__ = [
    "RingWork",
    "attention_recall",
    "backward_flops",
    "causal_pairs",
    "density",
    "forward_flops",
    "held_out_rows",
    "kept_pairs",
    "ring_work",
]
