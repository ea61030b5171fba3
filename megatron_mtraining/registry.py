"""Strategies by name: the estimators and budgets that a configuration may name."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from .errors import invalid


class Strategy(Protocol):
    """Strategy that a field of the configuration names."""

    reads: tuple[str, ...]
    """Fields of MTrainingConfig that this strategy reads and another of its kind may not."""


_Strategy = TypeVar("_Strategy", bound=Strategy)


class Registry(Generic[_Strategy]):
    """Strategies of one kind, in the order of registration."""

    def __init__(self, field: str) -> None:
        self.field = field
        self._by_name: dict[str, _Strategy] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all registered strategies."""
        return tuple(self._by_name)

    @property
    def fields(self) -> set[str]:
        """Fields of MTrainingConfig that at least one registered strategy reads."""
        return {name for strategy in self._by_name.values() for name in strategy.reads}

    def register(self, name: str, strategy: _Strategy) -> None:
        """Make ``strategy`` available as ``name``.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._by_name:
            raise invalid(f"{self.field} name", "new", repr(name), f"Taken are {', '.join(self.names)}.")
        self._by_name[name] = strategy

    def get(self, name: object) -> _Strategy:
        """Return the strategy that was registered as ``name``.

        Raises:
            ValueError: there is none; the sentence lists those that exist.
        """
        if not isinstance(name, str) or name not in self._by_name:
            remedy = f"Call register_{self.field} first for one of your own."
            raise invalid(self.field, f"one of {', '.join(self.names)}", repr(name), remedy)
        return self._by_name[name]


ESTIMATORS: Registry = Registry("estimator")
"""Estimators; the shipped ones are registered in selection/estimators.py."""

BUDGETS: Registry = Registry("budget")
"""Budgets; the shipped ones are registered in selection/budget.py."""
