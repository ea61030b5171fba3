"""Selection of the keys that each head attends to: patterns, estimators and budgets, on one device or a CP group.

A pattern is a function ``prepare(request)`` that plans, communicates nothing and may raise. It returns ``score``, which
makes the first passes over the keys and returns ``rank``, which completes the choice and returns the index. What
depends on no index, the first transfers of the ring, runs between these two. With the kernels all passes over scores
are in ``score``; the reference reads the keys once more in ``rank``.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import BUDGETS, ESTIMATORS
from ..request import AttentionRequest
from ..types import AttentionIndex
from . import dense, moba, vertical_slash, xattention
from .budget import AttentionMass, Budget, Choice, Selection, select_top_p
from .estimators import Estimator

__all__ = [
    "BUDGETS",
    "ESTIMATORS",
    "PATTERNS",
    "AttentionMass",
    "Budget",
    "Choice",
    "Estimator",
    "Selection",
    "prepare_selection",
    "select_top_p",
]

Rank = Callable[[], AttentionIndex]
Score = Callable[[], Rank]


PATTERNS: dict[str, Callable[[AttentionRequest], Score]] = {
    "vertical_slash": vertical_slash.prepare,
    "dense": dense.prepare,
    "moba": moba.prepare,
    "xattention": xattention.prepare,
}
"""The selection of each ``config.pattern``."""


def prepare_selection(request: AttentionRequest) -> Score:
    """Plan the selection that ``config.pattern`` names.

    Raises:
        ValueError: the pattern cannot do what the request asks for.
    """
    return PATTERNS[request.config.pattern](request)
