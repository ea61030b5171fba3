"""What a run leaves behind: every loss, what was observed at intervals, how it ended. Written as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Attention on a held-out sequence after some steps; means over layers and heads."""

    step: int
    held_out_loss: float
    density: float
    """Kept share of the causal pairs."""

    recall: float
    """Attention mass on the kept keys, over rows that the estimator did not look at."""

    worst_layer_recall: float
    """Of the layer that has least."""

    worst_head_recall: float
    """Of the head that has least."""

    worker_imbalance: float
    """The busiest rank's pairs over the mean rank's."""

    step_imbalance: float
    """The same with ranks that wait for each other in every ring step."""

    step_ms: float
    """Wall-clock milliseconds of a training step, the mean since the observation before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same weights on the same held-out text, with sparse and with dense attention."""

    sparse_loss: float
    dense_loss: float
    density: float
    recall: float

    @property
    def relative_gap(self) -> float:
        """How far the sparse loss is from the dense one, as a share of the dense one."""
        return abs(self.sparse_loss - self.dense_loss) / self.dense_loss


@dataclasses.dataclass(slots=True, kw_only=True)
class Journal:
    """One run."""

    dense_steps: int
    """Steps of the dense warm-up."""

    losses: list[float] = dataclasses.field(default_factory=list)
    observations: list[Observation] = dataclasses.field(default_factory=list)
    final: Comparison | None = None

    def loss_change(self) -> tuple[float, float]:
        """The first training loss, and the mean over the last twentieth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 20) :]
        return self.losses[0], sum(last) / len(last)

    def write(self, path: Path) -> None:
        """Writes everything as JSON, floats in full, so that two runs can be compared exactly."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
