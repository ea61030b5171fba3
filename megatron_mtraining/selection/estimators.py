"""Estimators: choice of the rows of a document that its attention is estimated from. Pluggable by name."""

from __future__ import annotations

from typing import Protocol

from ..config import MTrainingConfig
from ..registry import ESTIMATORS


class Estimator(Protocol):
    """Estimator of a document's attention. Stateless: every rank and every recomputation must agree."""

    reads: tuple[str, ...]
    """Fields of the configuration that this estimator reads and another may not."""

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return rows to score in the document of tokens ``start`` to ``stop - 1``: global, ascending, at least one."""
        ...


class LastWindow:
    """The last ``config.num_probe_rows`` rows of the document (Algorithm 1 of the MTraining paper)."""

    reads = ("num_probe_rows",)

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return the document's last rows, all of them where there are fewer."""
        return tuple(range(max(start, stop - config.num_probe_rows), stop))


class ProbeWindows:
    """``config.num_probe_rows`` rows in ``config.num_probe_windows`` windows, spread evenly over the document.

    Every row counts the same, so that their mean estimates the mean over all rows of the document, which recall
    measures: a key that only the later half can see has half the weight, because half of the rows need it.
    """

    reads = ("num_probe_rows", "num_probe_windows")

    def probe_rows(self, start: int, stop: int, config: MTrainingConfig) -> tuple[int, ...]:
        """Return the rows before each of the evenly spaced ends, all where the document has no more rows."""
        windows = config.num_probe_windows
        rows = config.num_probe_rows // windows
        if stop - start <= config.num_probe_rows:
            return tuple(range(start, stop))
        ends = (start + (stop - start) * (window + 1) // windows for window in range(windows))
        return tuple(row for end in ends for row in range(end - rows, end))


def register_estimator(name: str, estimator: Estimator) -> None:
    """Make ``estimator`` available as ``config.estimator = name``.

    Raises:
        ValueError: the name is taken.
    """
    ESTIMATORS.register(name, estimator)


def estimator_names() -> tuple[str, ...]:
    """Return the names of all registered estimators, in the order of registration."""
    return ESTIMATORS.names


def get_estimator(name: str) -> Estimator:
    """Return the estimator that was registered as ``name``.

    Raises:
        ValueError: there is none; the sentence lists those that exist.
    """
    return ESTIMATORS.get(name)


register_estimator("last_window", LastWindow())
register_estimator("probe_windows", ProbeWindows())
