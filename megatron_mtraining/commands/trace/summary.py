"""``mtraining trace FILE ...``: where the time of a torch profiler trace goes."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...arguments import CommandParser
from ...console import print_lines, text_table, whole_number
from .spans import Span, length, minus, union

GAP_US = 20.0
"""Microseconds from which on idle stretches of the computing stream are listed."""

KINDS = (
    ("communication", r"nccl"),
    ("attention forward", r"mtraining.*forward_kernel|flash_fwd|fmha.*fprop|cudnn.*fprop"),
    ("attention backward", r"mtraining.*(grad_(key|query)|backward_(key|query)|delta)_kernel|flash_bwd|fmha.*bprop"),
    ("packing of verticals", r"mtraining.*(un)?pack_kernel"),
    ("selection", r"mtraining.*(scores|columns|verticals|distances|slashes|statistics)_kernel"),
    ("tables", r"mtraining.*(vertical_bitmask|distance_bits)_kernel"),
    ("matrix products", r"gemm|cutlass|nvjet|cublas"),
    ("copies and fills", r"^Mem(cpy|set)"),
)
"""Kinds of kernels by their names; the first that fits. Everything else is ``other``."""


class Activity(NamedTuple):
    """A kernel, copy or fill on a stream of the GPU; microseconds."""

    name: str
    stream: int
    start: float
    stop: float

    @property
    def kind(self) -> str:
        """One of ``KINDS``, or ``other``."""
        return next((kind for kind, pattern in KINDS if re.search(pattern, self.name)), "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Time in which the GPU does nothing."""

    us: float
    after: str
    before: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One rank's trace, in microseconds."""

    window: float
    """Time from the first activity's start to the last one's end, or of the ranges asked for."""

    by_kind: dict[str, float]
    """Time with an activity of each kind, overlaps within a kind counted once."""

    exposed: float
    """Time in which a transfer is in flight and nothing is computed."""

    idle: float
    """Time in which nothing at all runs."""

    gaps: list[Gap]
    """The idle stretches of ``GAP_US`` and more, longest first."""

    top: list[tuple[str, int, float]]
    """The activities that take longest: name, count and time."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace, plain or gzipped."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text)
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("no list traceEvents of mappings")
    return events


def activities(events: Iterable[dict[str, Any]]) -> list[Activity]:
    """Return what ran on the GPU, by start."""
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Activity(event["name"], event["args"]["stream"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in on_gpu and event.get("ph") == "X"
    ]
    return sorted(found, key=lambda activity: activity.start)


def annotated(events: Iterable[dict[str, Any]], name: str) -> list[Span]:
    """Return the time when the GPU was busy with what ran inside ``record_function(name)``."""
    return [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"] == name
    ]


def steady(found: Sequence[Activity], events: Iterable[dict[str, Any]], name: str) -> list[Activity]:
    """Return what ran from the second ``record_function(name)`` on.

    Before it the GPU waits for launches, because nothing was ahead of it when the trace began. Of ranges on several
    streams those of the one that came first count.
    """
    ranges = [event for event in events if event.get("cat") == "gpu_user_annotation" and event["name"] == name]
    ranges.sort(key=lambda event: float(event["ts"]))
    _, second, *_ = (float(event["ts"]) for event in ranges if event["tid"] == ranges[0]["tid"])
    return [activity for activity in found if activity.start >= second]


def summarise(found: Sequence[Activity]) -> Timeline:
    """Summarise activities by start, at least one.

    A kernel of NCCL counts as a transfer for as long as it runs, waiting for its peer included.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    for activity in found:
        spans[activity.kind].append((activity.start, activity.stop))
    transfers = spans.get("communication", [])
    computing = [span for kind, own in spans.items() if kind != "communication" for span in own]
    window = (found[0].start, max(activity.stop for activity in found))
    idle = minus([window], transfers + computing)
    return Timeline(
        window=window[1] - window[0],
        by_kind={kind: length(own) for kind, own in sorted(spans.items(), key=lambda item: -length(item[1]))},
        exposed=length(minus(transfers, computing)),
        idle=length(idle),
        gaps=_gaps(found, idle),
        top=_top(found),
    )


def _gaps(found: Sequence[Activity], idle: Sequence[Span]) -> list[Gap]:
    long = sorted((span for span in idle if span[1] - span[0] >= GAP_US), key=lambda span: span[0] - span[1])
    ends = {activity.stop: activity.name for activity in found}
    starts = {activity.start: activity.name for activity in reversed(found)}
    return [Gap(us=stop - start, after=ends[start], before=starts[stop]) for start, stop in long]


def _top(found: Sequence[Activity], count: int = 12) -> list[tuple[str, int, float]]:
    calls: Counter[str] = Counter()
    time: dict[str, float] = defaultdict(float)
    for activity in found:
        calls[activity.name] += 1
        time[activity.name] += activity.stop - activity.start
    return [(name, calls[name], us) for name, us in sorted(time.items(), key=lambda item: -item[1])[:count]]


def report(timeline: Timeline, *, title: str, steps: int = 1) -> Iterator[str]:
    """Yield the lines of a page, milliseconds of one step of ``steps``."""
    parts = {"step": timeline.window, **timeline.by_kind}
    parts |= {"exposed communication": timeline.exposed, "idle": timeline.idle}
    rows = [(name, f"{us / steps / 1000:.3f}", f"{100 * us / timeline.window:.1f}") for name, us in parts.items()]
    yield title
    yield from text_table(("", "ms", "%"), rows, indent="  ")
    gaps_ms = sum(gap.us for gap in timeline.gaps) / 1000
    yield f"  gaps of {GAP_US:g} us and more: {len(timeline.gaps)}, {gaps_ms:.3f} ms"
    gaps = [(f"{gap.us:.0f}", _short(gap.after), _short(gap.before)) for gap in timeline.gaps[:8]]
    yield from text_table(("us", "after", "before"), gaps, indent="    ")
    top = [(f"{us / 1000:.3f}", str(calls), _short(name, 80)) for name, calls, us in timeline.top]
    yield from text_table(("ms", "calls", "longest"), top, indent="    ")


def _short(name: str, width: int = 40) -> str:
    name = re.sub(r"^void |\(.*\)$", "", name)
    return name if len(name) <= width else name[: width - 3] + "..."


_DESCRIPTION = """\
Prints where the time of a trace goes: kernels by kind, exposed communication, gaps. Reads the files of torch.profiler,
of Megatron's --use-pytorch-profiler for example, or of "mtraining trace layer", which measures one layer on the GPUs
of this machine (mtraining trace layer --help).

  mtraining trace trace.json other.json.gz --steps 3"""


def main(argv: Sequence[str]) -> None:
    """Summarise the files of the command line; exit with status 2 and one sentence where one is unreadable."""
    parser = CommandParser(prog="mtraining trace", description=_DESCRIPTION)
    parser.add_argument("traces", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--inside", metavar="NAME", help="only what ran inside record_function of this name")
    parser.add_argument("--steps", type=whole_number(1, 10**6), default=1, help="steps in each trace (1)")
    arguments = parser.parse_args(argv)
    for path in arguments.traces:
        try:
            events = read_trace(path)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            parser.error(f"{path} must be a readable Chrome trace, got {type(error).__name__}: {error}")
        found = activities(events)
        if arguments.inside:
            inside = union(annotated(events, arguments.inside))
            found = [a for a in found if any(start <= a.start < stop for start, stop in inside)]
        if not found:
            parser.error(f"{path} must be a trace with activities of a GPU, got none.")
        print_lines(report(summarise(found), title=str(path), steps=arguments.steps))
