"""Registry of baselines: registered by name and bound to one problem's tensors before they run.

To add one, write ``bind`` and ``obstacle`` for it in a module, call :func:`register` there, and import the module in
``tools/bench/baselines/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_mtraining.errors import invalid
from megatron_mtraining.types import VerticalSlashIndex

from .problem import Inputs, Problem


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A baseline with the tensors of one problem; making it is not timed."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Function of query, key and value to ``out`` ``[batch, seq, num_heads, head_dim]``; differentiable."""

    leaves: tuple[Tensor, Tensor, Tensor]
    """Inputs of ``attend``: the problem's own tensors, or copies where a baseline needs another shape."""

    retains_graph: bool = True
    """True if one forward serves many backward passes; where False, each has a forward of its own."""

    issued_pairs: int | None = None
    """(query, key) pairs that the products of a forward cover, masked ones included; None where nobody can tell."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A way to compute attention."""

    name: str
    is_dense: bool
    """True if it computes every causal pair and knows nothing of the index."""

    bind: Callable[[Problem, Inputs, VerticalSlashIndex], Bound]
    unavailable: Callable[[Problem], str | None]
    """One sentence on why it cannot run here, or None."""

    is_ours: bool = False


REGISTRY: dict[str, Baseline] = {}


def register(baseline: Baseline) -> None:
    """Add a baseline; the order of registration is the order of the tables.

    Raises:
        ValueError: the name is taken.
    """
    if baseline.name in REGISTRY:
        raise invalid("baseline.name", "new", baseline.name)
    REGISTRY[baseline.name] = baseline


def chosen(names: str) -> list[Baseline]:
    """Return the baselines of a comma-separated list, or all.

    Raises:
        ValueError: an unknown name.
    """
    if names == "all":
        return list(REGISTRY.values())
    for name in names.split(","):
        if name not in REGISTRY:
            raise invalid("--baselines", f"all, or some of {', '.join(REGISTRY)}", name)
    return [REGISTRY[name] for name in dict.fromkeys(names.split(","))]
