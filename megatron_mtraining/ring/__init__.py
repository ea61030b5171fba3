"""Ring attention: the schedule of KV blocks, and forward and backward over it. One device is a ring of one rank."""

from .ring import PostedKV, RingAttention, RingContext, post_kv
from .schedule import RingSchedule, RingShape, RingStep, ring_schedule

__all__ = [
    "PostedKV",
    "RingAttention",
    "RingContext",
    "RingSchedule",
    "RingShape",
    "RingStep",
    "post_kv",
    "ring_schedule",
]
