"""WHO still lives: ranks that died are named by every other one, without a cost to a step."""

from .job import news_of_a_death, start_rank_watch, stop_rank_watch

__all__ = ["news_of_a_death", "start_rank_watch", "stop_rank_watch"]
