"""Estimators: choice of a document's probe rows, and of the keys by the mass they show. Pluggable by name."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..config import MTrainingConfig
from ..errors import invalid
from .budget import Selection, select_runs, select_top_p
from .probe_mass import ProbeMass


class Choice(NamedTuple):
    """Columns and distances that each lane keeps beside its sinks and local blocks."""

    vertical: Selection
    """Columns, counted as :class:`ProbeMass` does; at most ``config.max_vertical`` of them."""

    slash: Selection
    """Block distances; at most ``config.max_slash`` of them."""


class Estimator(Protocol):
    """Estimator of the keys that a head attends to. Stateless: every rank and every recomputation must agree."""

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return rows to score in the document of tokens ``start`` to ``stop - 1``: global, ascending, at least one."""
        ...

    def choose(self, mass: ProbeMass, config: MTrainingConfig) -> Choice:
        """Choose columns and distances for each lane.

        The widths of what it returns must depend on shapes and ``config`` only, so that the host need not wait.
        """
        ...


def choose_by_budget(mass: ProbeMass, config: MTrainingConfig) -> Choice:
    """Choose verticals, then slashes from the mass that the verticals leave (Algorithm 1 of the MTraining paper).

    Slashes are chosen in runs of ``config.slash_run_length`` neighbours, the first of which follows the local blocks.

    An estimator whose ``choose`` is this function runs on the CUDA kernels (``fused``), which never call it.
    """
    vertical = select_top_p(mass.columns(), top_p=config.vertical_top_p, at_most=config.max_vertical)
    slash = select_runs(
        mass.without(vertical).distances(),
        first=config.local_blocks,
        run_length=config.slash_run_length,
        top_p=config.slash_top_p,
        at_most=config.max_slash,
    )
    return Choice(vertical, slash)


class LastWindow:
    """The last ``config.window`` rows of the document (Algorithm 1 of the MTraining paper)."""

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return the document's last rows, all of them where it is shorter than the window."""
        return tuple(range(max(start, stop - config.window), stop))

    choose = staticmethod(choose_by_budget)


class ProbeWindows:
    """``config.window`` rows in ``config.num_probe_windows`` pieces, spread evenly over the document up to its end.

    Every row counts the same. Their mean then estimates the mean over all rows of the document, which is what recall
    measures: a key that only the later half can see has half the weight, because it serves half of the rows. Dividing
    by the number of rows that see a key, or by the pairs that it costs, recalled no more at equal density on the data
    of ``tools/recall.py``.
    """

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return the rows before each of the evenly spaced ends, all where the document is shorter than the window."""
        pieces = config.num_probe_windows
        rows = config.window // pieces
        if stop - start <= config.window:
            return tuple(range(start, stop))
        ends = (start + (stop - start) * (piece + 1) // pieces for piece in range(pieces))
        return tuple(row for end in ends for row in range(end - rows, end))

    choose = staticmethod(choose_by_budget)


_ESTIMATORS: dict[str, Estimator] = {}


def register_estimator(name: str, estimator: Estimator) -> None:
    """Make ``estimator`` available as ``config.estimator = name``.

    Raises:
        ValueError: the name is taken.
    """
    if name in _ESTIMATORS:
        raise invalid("estimator name", "new", repr(name), f"Taken are {', '.join(estimator_names())}.")
    _ESTIMATORS[name] = estimator


def estimator_names() -> tuple[str, ...]:
    """Return the names of all registered estimators, in the order of registration."""
    return tuple(_ESTIMATORS)


def get_estimator(name: str) -> Estimator:
    """Return the estimator that was registered as ``name``.

    Raises:
        ValueError: there is none; the sentence lists those that exist.
    """
    if name not in _ESTIMATORS:
        known = ", ".join(estimator_names())
        raise invalid("estimator", f"one of {known}", repr(name), "Call register_estimator first for one of your own.")
    return _ESTIMATORS[name]


register_estimator("last_window", LastWindow())
register_estimator("probe_windows", ProbeWindows())
