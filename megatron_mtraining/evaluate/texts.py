"""Benchmarks without instructions: loss of a text by position, and of a second copy of a passage by distance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import invalid
from .sample import Sample
from .source import Source

PERPLEXITY, COPY = "perplexity", "copy"

NUM_POSITIONS = 16
"""Parts of a text whose losses are averaged."""

DISTANCES = 4
"""Distances of the copies: all the length, a half of it, a quarter, an eighth."""

SHORTEST = 256
"""Tokens of the shortest text."""


def perplexity_samples(source: Source, length: int) -> Iterator[Sample]:
    """Yield drawn passages of ``length`` tokens; every token is predicted from the first one on, nothing slides.

    Raises:
        ValueError: there is no text, or it is shorter.
    """
    _check_length(PERPLEXITY, length)
    for number in range(source.samples):
        rng = source.rng(PERPLEXITY, length, number)
        tokens = source.cut(PERPLEXITY, length - len(source.first), rng)
        yield Sample(benchmark=PERPLEXITY, length=length, number=number, tokens=np.concatenate([source.first, tokens]))


def copy_samples(source: Source, length: int) -> Iterator[Sample]:
    """Yield texts that end with a second copy of a passage, whose first one lies at a distance.

    Raises:
        ValueError: there is no text, or it is shorter.
    """
    _check_length(COPY, length)
    copied = min(512, length // 16)
    number = 0
    for i in reversed(range(DISTANCES)):
        for _ in range(source.samples):
            tokens = source.cut(COPY, length, source.rng(COPY, length, number)).copy()
            tokens[: len(source.first)] = source.first
            distance = (length >> i) - (copied + len(source.first) if i == 0 else 0)
            tokens[-copied:] = tokens[length - copied - distance : length - distance]
            coordinates = {"distance": distance, "copied": copied}
            yield Sample(benchmark=COPY, length=length, number=number, tokens=tokens, coordinates=coordinates)
            number += 1


def _check_length(name: str, length: int) -> None:
    if length < SHORTEST:
        raise invalid("--lengths", f"at least {SHORTEST} for {name}", length)


def measure(sample: Sample, losses: np.ndarray) -> dict[str, object]:
    """Return what is stored of the losses: ``value`` in nats a token, and parts of it.

    Args:
        sample: of one of these benchmarks.
        losses: float32 ``[tokens - 1]``, of each token after the first.
    """
    if sample.benchmark == PERPLEXITY:
        parts = [float(part.mean()) for part in np.array_split(losses.astype(np.float64), NUM_POSITIONS)]
        return {"value": float(losses.mean(dtype=np.float64)), "by_position": parts}
    copied, distance = int(sample.coordinates["copied"]), int(sample.coordinates["distance"])
    first = len(losses) - copied - distance
    return {
        "value": float(losses[-copied:].mean(dtype=np.float64)),
        "first_copy": float(losses[max(first, 0) : first + copied].mean(dtype=np.float64)),
    }
