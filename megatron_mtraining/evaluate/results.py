"""Results of samples: a file that grows by a line for each, so that an interrupted run continues, and means of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InvalidError
from . import ruler
from .benchmarks import LOSS, metric_of
from .sample import Sample


@dataclass(frozen=True, slots=True)
class Request:
    """One sample for one model under one kind of inference."""

    model: str
    inference: str
    sample: Sample
    digest: str
    """Key of everything that decides the result: sample, model, configuration, version."""

    @property
    def cell(self) -> tuple[str, int, str, str]:
        """Benchmark, length, model and inference, over whose samples is averaged."""
        return self.sample.benchmark, self.sample.length, self.model, self.inference


class ResultFile:
    """Lines of results in a folder; each shard appends to a file of its own and reads those of all."""

    def __init__(self, folder: Path, shard: int, num_shards: int) -> None:
        self._folder = folder
        self._path = folder / f"results_{shard}_of_{num_shards}.jsonl"
        if self._path.exists():  # an interrupted run may have ended inside a line
            content = self._path.read_bytes()
            self._path.write_bytes(content[: content.rfind(b"\n") + 1])

    def read(self) -> dict[str, dict[str, object]]:
        """Return the results of all shards by digest; one with ``error``, the latest, has no ``value``."""
        found: dict[str, dict[str, object]] = {}
        for path in sorted(self._folder.glob("results_*_of_*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path)):
            for line in path.read_bytes().split(b"\n")[:-1]:
                entries = json.loads(line)
                if "value" in entries or "value" not in found.get(entries["digest"], ()):
                    found[entries["digest"]] = entries
        return found

    def append(self, request: Request, result: dict[str, object]) -> None:
        """Write one line."""
        sample = request.sample
        entries = {
            "digest": request.digest,
            "model": request.model,
            "inference": request.inference,
            "benchmark": sample.benchmark,
            "length": sample.length,
            "number": sample.number,
            **sample.coordinates,
            **result,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(entries) + "\n")


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None of one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


@dataclass(frozen=True, slots=True)
class Cell:
    """Mean over the samples of a benchmark, length, model and inference."""

    benchmark: str
    length: int
    model: str
    inference: str
    metric: str
    mean: float
    standard_error: float | None
    """Standard error of the mean over samples; None of one sample."""

    num_samples: int
    density: float | None
    """Mean share of the causal pairs that the prefill computes, over the layers that select; None without any."""

    @classmethod
    def of(cls, requests: Sequence[Request], results: Sequence[dict[str, object]]) -> Cell:
        """Average."""
        first, values = requests[0], [result["value"] for result in results]
        mean = sum(values) / len(values)
        densities = [result["density"] for result in results if result["density"] is not None]
        return cls(
            first.sample.benchmark,
            first.sample.length,
            first.model,
            first.inference,
            metric_of(first.sample),
            mean,
            standard_error(values),
            len(values),
            sum(densities) / len(densities) if densities else None,
        )

    @classmethod
    def of_parts(cls, benchmark: str, parts: Sequence[Cell]) -> Cell:
        """Average the parts of a benchmark, each of which counts the same."""
        errors, densities = ([getattr(cell, name) for cell in parts] for name in ("standard_error", "density"))
        return replace(
            parts[0],
            benchmark=benchmark,
            mean=sum(cell.mean for cell in parts) / len(parts),
            standard_error=None if None in errors else math.hypot(*errors) / len(parts),
            num_samples=sum(cell.num_samples for cell in parts),
            density=None if None in densities else sum(densities) / len(parts),
        )

    @property
    def text(self) -> str:
        """Mean and standard error, as a table has them."""
        digits = 4 if self.metric == LOSS else 2
        error = "" if self.standard_error is None else f" ±{self.standard_error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"

    @property
    def density_text(self) -> str:
        """Density, as a table has it."""
        return "-" if self.density is None else f"{self.density:.1%}"


def cells(requests: Iterable[Request], results: dict[str, dict[str, object]]) -> list[Cell]:
    """Return the means over samples, in the order of the requests; of RULER also the mean over its parts.

    A benchmark, length, model and inference of which a sample has no value has no mean.

    Raises:
        ValueError: a result is missing.
    """
    requests = list(requests)
    missing = sum(request.digest not in results for request in requests)
    if missing:
        raise InvalidError(f"unsupported: a report with {missing} results missing. Run the other shards first.")
    grouped: dict[tuple[object, ...], list[Request]] = {}
    for request in requests:
        grouped.setdefault(request.cell, []).append(request)
    measured = [(group, [results[request.digest] for request in group]) for group in grouped.values()]
    means = [Cell.of(group, each) for group, each in measured if all("value" in result for result in each)]
    parts = {request.sample.benchmark for request in requests if request.sample.benchmark.startswith(f"{ruler.NAME}/")}
    grouped_parts: dict[tuple[object, ...], list[Cell]] = {}
    for cell in means:
        if cell.benchmark in parts:
            grouped_parts.setdefault((cell.length, cell.model, cell.inference), []).append(cell)
    return means + [Cell.of_parts(ruler.NAME, each) for each in grouped_parts.values() if len(each) == len(parts)]
