"""Search over all parallel sizes, layouts, schedules and memory savers; plans that fit are ranked by predicted time."""

from __future__ import annotations

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

_OF_REQUEST = ("node_size", "global_batch", "attention", "index_sharing")  # fields of each plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Sizes and limits that are given."""

    model: ModelShape
    load: Load
    profile: Profile
    gpus: int
    node_size: int
    memory_gib: float  # of each GPU
    margin: float  # share of the memory that remains free, for fragmentation
    global_batch: int
    attention: str
    index_sharing: str
    layouts: Sequence[str]
    schedules: Sequence[str]
    recompute: Sequence[str]
    offload: Sequence[bool]
    fixed: dict[str, int]  # sizes of tp, cp, pp or dp that are not to be chosen
    notes: tuple[str, ...] = ()  # sentences on what plans do not follow


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
    errors: Counter[str] = Counter()
    plans = [(plan, memory_of(request.model, plan)) for plan in _plans(request, errors)]
    if not plans:
        raise _nothing_divides(request, errors)
    clock = AttentionClock(model=request.model, load=request.load, profile=request.profile)
    of_sizes: dict[str, list[Candidate]] = {}
    for plan, memory in plans:
        if memory.total <= request.memory_gib * GIB * (1 - request.margin):
            candidate = Candidate(plan=plan, memory=memory, time=step_time(request.model, plan, clock))
            of_sizes.setdefault(plan.sizes_text(), []).append(candidate)
    if not of_sizes:
        raise _nothing_fits(*min(plans, key=lambda each: each[1].total), request)
    best = []
    for candidates in of_sizes.values():
        slowest = _ALIKE * min(each.time.total for each in candidates)
        best.append(next(each for each in candidates if each.time.total <= slowest))
    return sorted(best, key=lambda each: each.time.total)


def _plans(request: Request, errors: Counter[str]) -> Iterator[Plan]:
    """Yield every plan whose sizes divide, whether it fits or not; ``errors`` counts the sentences on others."""
    given = {name: getattr(request, name) for name in _OF_REQUEST} | {"pack_width": request.load.pack_width}
    for sizes in _parallel_sizes(request):
        options = (request.layouts, request.schedules)
        if sizes["cp"] == 1:  # a single rank has the sequence: they are all the same
            options = (request.layouts[:1], request.schedules[:1])
        for layout, schedule in product(*options):
            plan = Plan(**sizes, **given, seq_len=request.load.seq_len, layout=layout, schedule=schedule)
            try:
                check_plan(request.model, plan)
            except ValueError as error:
                errors[str(error)] += 1
                continue
            for recompute, offload in product(request.recompute, request.offload):
                yield replace(plan, recompute=recompute, offload=offload)


def _parallel_sizes(request: Request) -> Iterator[dict[str, int]]:
    """Yield every ``tp * cp * pp * dp`` of the GPUs that has the fixed sizes."""
    divisors = [size for size in range(1, request.gpus + 1) if request.gpus % size == 0]
    for tp, cp, pp in product(divisors, repeat=3):
        dp, rest = divmod(request.gpus, tp * cp * pp)
        sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        if not rest and all(sizes[name] == size for name, size in request.fixed.items()):
            yield sizes


def _nothing_divides(request: Request, errors: Counter[str]) -> ValueError:
    fixed = ", ".join(f"{name} {size}" for name, size in request.fixed.items()) or "no fixed size"
    if not errors:
        return invalid("the fixed sizes", f"factors whose product divides {request.gpus} GPUs", fixed)
    reasons = (*(sentence for sentence, _ in errors.most_common(3)), *request.notes)
    return invalid("the request", "one whose sizes divide", f"{request.gpus} GPUs with {fixed}", " ".join(reasons))


def _nothing_fits(plan: Plan, memory: Memory, request: Request) -> ValueError:
    needed = memory.total / GIB / (1 - request.margin)
    parts = {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer")}
    parts[f"activations ({memory.moment})"] = memory.saved + memory.working
    largest = max(parts, key=parts.__getitem__)
    recompute = "full recomputation" if plan.recompute == FULL else f"recomputation {plan.recompute}"
    offload = ", optimizer states on the host" if plan.offload else ""
    rule = f"at least {needed:.1f} GiB per GPU at {plan.sizes_text()} with {recompute}{offload}, the least of all plans"
    remedy = (
        f"{needed - request.memory_gib:.1f} GiB are missing; {largest} take {parts[largest] / GIB:.1f} GiB. "
        f"More GPUs, a shorter --seq or a smaller model would help."
    )
    return invalid("--gpu-memory", rule, f"{request.memory_gib:g} GiB", " ".join((remedy, *request.notes)))
