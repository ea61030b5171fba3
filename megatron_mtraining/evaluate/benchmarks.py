"""Benchmarks by name: their samples, and the value of what a model made of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from . import infinitebench, needle, ruler, texts
from .sample import Sample
from .source import Source

ACCURACY, LOSS = "accuracy", "nats a token"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark."""

    samples: Callable[[Source, int], Iterator[Sample]]
    metric: str


BENCHMARKS = {
    needle.NAME: Benchmark(needle.samples, ACCURACY),
    ruler.NAME: Benchmark(ruler.samples, ACCURACY),
    texts.PERPLEXITY: Benchmark(texts.perplexity_samples, LOSS),
    texts.COPY: Benchmark(texts.copy_samples, LOSS),
    infinitebench.NAME: Benchmark(infinitebench.samples, ACCURACY),
}


def make_samples(source: Source, names: Sequence[str], lengths: Sequence[int]) -> Iterator[Sample]:
    """Yield all samples, short ones first.

    Raises:
        ImportError: a benchmark needs a package that is not installed.
        ValueError: a benchmark needs what was not given.
    """
    for length in sorted(lengths):
        for name in names:
            yield from BENCHMARKS[name].samples(source, length)


def metric_of(sample: Sample) -> str:
    """Return the metric of a sample's benchmark."""
    return BENCHMARKS[sample.benchmark.partition("/")[0]].metric


def score(sample: Sample, generated: str) -> float:
    """Return the score of a generated answer, from 0 to 1."""
    if sample.benchmark == needle.NAME:
        return needle.score(generated, sample.answers)
    if sample.benchmark.startswith(f"{ruler.NAME}/"):
        return ruler.score(sample, generated)
    return infinitebench.score(sample.benchmark, generated, sample.answers)
