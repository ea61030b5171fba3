"""Half-open stretches of time, ``[start, stop)`` in microseconds, and operations on them."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time without overlaps, ascending."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        elif stop > start:
            joined.append((start, stop))
    return joined


def minus(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the time of ``spans`` that no one of ``others`` covers."""
    left: list[Span] = []
    cover = union(others)
    first = 0
    for start, stop in union(spans):
        while first < len(cover) and cover[first][1] <= start:
            first += 1
        for slot in range(first, len(cover)):
            low, high = cover[slot]
            if low >= stop:
                break
            if low > start:
                left.append((start, low))
            start = max(start, high)
        if start < stop:
            left.append((start, stop))
    return left


def length(spans: Iterable[Span]) -> float:
    """Return microseconds, overlaps counted once."""
    return sum(stop - start for start, stop in union(spans))
