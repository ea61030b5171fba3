"""Ring attention: whose keys a rank meets when, how they travel, and what is computed meanwhile."""

from .attention import ring_attention
from .schedule import RingSchedule, ring_schedule
from .start import RingStart, start_ring

__all__ = ["RingSchedule", "RingStart", "ring_attention", "ring_schedule", "start_ring"]
