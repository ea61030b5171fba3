"""WHICH keys each head keeps: estimators, budgets and the selection over one device or a context-parallel group."""

from .budget import Selection, select_top_p
from .estimators import Choice, Estimator, choose_by_budget, estimator_names, get_estimator, register_estimator
from .moba import select_moba
from .patterns import SELECTIONS, select_dense, select_index
from .probe_mass import ProbeMass
from .shards import SequenceShards
from .vertical_slash import select_vertical_slash
from .xattention import select_xattention

__all__ = [
    "SELECTIONS",
    "Choice",
    "Estimator",
    "ProbeMass",
    "Selection",
    "SequenceShards",
    "choose_by_budget",
    "estimator_names",
    "get_estimator",
    "register_estimator",
    "select_dense",
    "select_index",
    "select_moba",
    "select_top_p",
    "select_vertical_slash",
    "select_xattention",
]
