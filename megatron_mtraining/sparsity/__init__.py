"""WHICH keys each head keeps: estimators, budgets and the selection over one device or a context-parallel group."""

from .budget import Selection, select_top_p
from .estimators import Choice, Estimator, choose_by_budget, estimator_names, get_estimator, register_estimator
from .probe_mass import ProbeMass
from .selection import select_vertical_slash
from .shards import SequenceShards

__all__ = [
    "Choice",
    "Estimator",
    "ProbeMass",
    "Selection",
    "SequenceShards",
    "choose_by_budget",
    "estimator_names",
    "get_estimator",
    "register_estimator",
    "select_top_p",
    "select_vertical_slash",
]
