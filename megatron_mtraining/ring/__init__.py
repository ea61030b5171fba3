"""Ring attention: whose keys a rank meets when, how they travel, and what is computed meanwhile."""

from .attention import ring_attention
from .schedule import RingSchedule, ring_schedule

__all__ = ["RingSchedule", "ring_attention", "ring_schedule"]
