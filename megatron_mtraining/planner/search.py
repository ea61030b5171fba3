"""Search over every way to spread a model over the GPUs; those that fit are ranked by predicted time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..errors import invalid
from .attention_clock import AttentionClock, Load
from .memory import GIB, Memory, memory_of
from .model import ModelShape
from .plan import FULL, Plan, check_plan
from .profile import Profile
from .step_time import StepTime, step_time

_ALIKE = 1.01
"""Ratio of times below which two plans count as equally fast: predictions are not better than that."""

_GIVEN = ("node_size", "global_batch", "attention", "index_sharing")
"""Fields of a request that are those of each plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Sizes and limits that are given."""

    model: ModelShape
    load: Load
    profile: Profile
    gpus: int
    node_size: int
    memory_gib: float
    """Memory of each GPU."""

    margin: float
    """Share of the memory that stays free, for fragmentation."""

    global_batch: int
    attention: str
    index_sharing: str
    layouts: Sequence[str]
    schedules: Sequence[str]
    recompute: Sequence[str]
    offload: Sequence[bool]
    fixed: dict[str, int]
    """Sizes of ``tp``, ``cp``, ``pp`` or ``dp`` that are not to be chosen."""

    notes: tuple[str, ...] = ()
    """Sentences on requests that plans do not follow."""

    def fits(self, memory: Memory) -> bool:
        """Return whether a GPU holds ``memory`` and leaves the margin free."""
        return memory.total <= self.memory_gib * GIB * (1 - self.margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its predictions."""

    plan: Plan
    memory: Memory
    time: StepTime


def search(request: Request) -> list[Candidate]:
    """Return the best plan of each set of parallel sizes, fastest first; all fit.

    Of plans that take as long, to a hundredth, it is the first in the order of the request.

    Raises:
        ValueError: no sizes divide, or nothing fits; the sentence has what does not divide, or how much is missing.
    """
    refusals: Counter[str] = Counter()
    plans = [(plan, memory_of(request.model, plan)) for plan in _plans(request, request.load.seq_len, refusals)]
    if not plans:
        raise _nothing_divides(request, refusals)
    clock = AttentionClock(model=request.model, load=request.load, profile=request.profile)
    of_sizes: dict[str, list[Candidate]] = {}
    for plan, memory in plans:
        if request.fits(memory):
            candidate = Candidate(plan=plan, memory=memory, time=step_time(request.model, plan, clock))
            of_sizes.setdefault(plan.sizes_text(), []).append(candidate)
    if not of_sizes:
        raise _nothing_fits(*min(plans, key=lambda each: each[1].total), request)
    best = []
    for candidates in of_sizes.values():
        slowest = _ALIKE * min(each.time.total for each in candidates)
        best.append(next(each for each in candidates if each.time.total <= slowest))
    return sorted(best, key=lambda each: each.time.total)


def length_note(request: Request) -> str:
    """Return a sentence on context-parallel sizes that only the sequence length excludes; empty if it excludes none."""
    seq_len, least = request.load.seq_len, {}
    for cp, multiple in sorted(_length_multiples(request), reverse=True):
        if multiple <= seq_len:
            least[cp] = multiple
    divided = ", ".join(str(cp) for cp in sorted(least) if seq_len % least[cp] == 0)
    longer: dict[int, list[str]] = {}
    for cp in sorted(least):
        if seq_len % least[cp]:
            longer.setdefault(-(-seq_len // least[cp]) * least[cp], []).append(str(cp))
    told = ", ".join(f"{length} over cp {' and '.join(sizes)}" for length, sizes in sorted(longer.items()))
    over = f"cp {divided} only" if divided else "no cp"
    return f"{seq_len} tokens divide over {over}; the next lengths are {told}." if told else ""


def _lengths_that_fit(request: Request) -> list[int]:
    """Return the nearest shorter and the nearest longer sequence that fit, of those that more sizes divide."""
    seq_len, found = request.load.seq_len, {}
    multiples = {multiple for _, multiple in _length_multiples(request) if seq_len % multiple}
    around = {(seq_len // multiple + more) * multiple for multiple in multiples for more in (0, 1)}
    for length in sorted(around - {0}, key=lambda length: abs(length - seq_len)):
        is_longer = length > seq_len
        if is_longer not in found and any(request.fits(memory_of(request.model, p)) for p in _plans(request, length)):
            found[is_longer] = length
    return sorted(found.values())


def _length_multiples(request: Request) -> set[tuple[int, int]]:
    """Return context-parallel sizes that the model allows, each with the length multiple that a layout needs."""
    ways = product(_parallel_sizes(request), request.layouts)
    every_multiple = (Plan(**sizes, layout=layout, seq_len=1).length_multiple for sizes, layout in ways)
    return {(plan.cp, plan.length_multiple) for plan in _plans(request, math.lcm(*every_multiple))}


def _plans(request: Request, seq_len: int, refusals: Counter[str] | None = None) -> Iterator[Plan]:
    """Yield every plan whose sizes divide, fitting or not; ``refusals`` counts the sentences on others."""
    given = {name: getattr(request, name) for name in _GIVEN} | {"pack_width": request.load.pack_width}
    for sizes in _parallel_sizes(request):
        options = (request.layouts, request.schedules)
        if sizes["cp"] == 1:  # a single rank holds the sequence: they are all the same
            options = (request.layouts[:1], request.schedules[:1])
        for layout, schedule in product(*options):
            plan = Plan(**sizes, **given, seq_len=seq_len, layout=layout, schedule=schedule)
            try:
                check_plan(request.model, plan)
            except ValueError as error:
                if refusals is not None:
                    refusals[str(error)] += 1
                continue
            for recompute, offload in product(request.recompute, request.offload):
                yield replace(plan, recompute=recompute, offload=offload)


def _parallel_sizes(request: Request) -> Iterator[dict[str, int]]:
    """Yield every ``tp * cp * pp * dp`` of the GPUs that keeps to the fixed sizes."""

    def sizes_of(name: str, total: int) -> list[int]:
        fixed = request.fixed.get(name)
        return [size for size in range(1, total + 1) if total % size == 0 and fixed in (None, size)]

    for tp in sizes_of("tp", request.gpus):
        for cp in sizes_of("cp", request.gpus // tp):
            for pp in sizes_of("pp", request.gpus // tp // cp):
                dp = request.gpus // tp // cp // pp
                if request.fixed.get("dp", dp) == dp:
                    yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp}


def _nothing_divides(request: Request, refusals: Counter[str]) -> ValueError:
    fixed = ", ".join(f"{name} {size}" for name, size in request.fixed.items())
    if not refusals:
        return invalid("the fixed sizes", f"factors whose product divides {request.gpus} GPUs", fixed)
    told = " ".join(sentence for sentence, _ in refusals.most_common(3)) + _remedy_by_length(request)
    given = f"{request.gpus} GPUs" + (f" with {fixed}" if fixed else "")
    return invalid("the request", "one whose sizes divide", given, told)


def _remedy_by_length(request: Request) -> str:
    """Return lengths that would fit where the given one does not, and a sentence on what it excludes."""
    note = length_note(request)
    lengths = " or ".join(map(str, _lengths_that_fit(request) if note else ()))
    return (f" A --seq of {lengths} would fit: {note}" if lengths else f" {note}") if note else ""


def _nothing_fits(plan: Plan, memory: Memory, request: Request) -> ValueError:
    needed = memory.total / GIB / (1 - request.margin)
    parts = {
        f"activations ({memory.moment})": memory.kept + memory.working,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer,
        "weights": memory.weights,
    }
    largest = max(parts, key=parts.__getitem__)
    recompute = "full recomputation" if plan.recompute == FULL else f"recomputation {plan.recompute}"
    way = f"{plan.sizes_text()} with {recompute}" + (", optimizer states on the host" if plan.offload else "")
    remedy = (
        f"{needed - request.memory_gib:.1f} GiB are missing; {largest} take {parts[largest] / GIB:.1f} GiB. "
        f"More GPUs, a shorter --seq or a smaller model would help.{_remedy_by_length(request)}"
    )
    rule = f"at least {needed:.1f} GiB per GPU at {way}, the least of all plans"
    return invalid("--gpu-memory", rule, f"{request.memory_gib:g} GiB", remedy)
