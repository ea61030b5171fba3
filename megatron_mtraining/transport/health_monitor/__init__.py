"""Health monitor, off unless it is started: a thread in each rank that names a rank that died."""

from .process import lost_rank_message, start_health_monitor, stop_health_monitor

__all__ = ["lost_rank_message", "start_health_monitor", "stop_health_monitor"]
