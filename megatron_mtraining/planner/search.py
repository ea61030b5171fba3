"""Tries every way to spread a model over the GPUs and ranks those that fit by predicted time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import invalid
from .attention_clock import AttentionClock, Load
from .memory import GIB, Memory, memory_of
from .model_shape import ModelShape
from .plan import FULL, Plan, check_plan
from .profile import Profile
from .step_time import StepTime, step_time

_ALIKE = 1.01
"""Ratio of times below which two plans count as equally fast: predictions are not better than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is given."""

    model: ModelShape
    load: Load
    profile: Profile
    gpus: int
    node_size: int
    memory_gib: float
    """Of each GPU."""

    margin: float
    """Share of it that stays free, for fragmentation."""

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

    @property
    def usable_bytes(self) -> float:
        """What a plan may take of a GPU."""
        return self.memory_gib * GIB * (1 - self.margin)

    def fits(self, memory: Memory) -> bool:
        """Whether a GPU holds ``memory`` and leaves the margin free."""
        return memory.total <= self.usable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its predictions."""

    plan: Plan
    memory: Memory
    time: StepTime


def search(request: Request) -> list[Candidate]:
    """The best plan of each set of parallel sizes, fastest first; all fit.

    Of plans that take as long, to a hundredth, it is the first in the order of the request.

    Raises:
        ValueError: no sizes divide, or nothing fits; the sentence says what divides not, or how much is missing.
    """
    plans = [(plan, memory_of(request.model, plan)) for plan in possible_plans(request)]
    fitting = [each for each in plans if request.fits(each[1])]
    if not fitting:
        raise _nothing_fits(*min(plans, key=lambda each: each[1].total), request)
    clock = AttentionClock(model=request.model, load=request.load, profile=request.profile)
    candidates = [
        Candidate(plan=plan, memory=memory, time=step_time(request.model, plan, clock)) for plan, memory in fitting
    ]
    fastest: dict[str, float] = {}
    for each in candidates:
        sizes = each.plan.sizes_text()
        fastest[sizes] = min(each.time.total, fastest.get(sizes, each.time.total))
    best: dict[str, Candidate] = {}
    for each in candidates:
        sizes = each.plan.sizes_text()
        if each.time.total <= _ALIKE * fastest[sizes]:
            best.setdefault(sizes, each)
    return sorted(best.values(), key=lambda each: each.time.total)


def possible_plans(request: Request) -> list[Plan]:
    """Every plan whose sizes divide, whether it fits or not.

    Raises:
        ValueError: there is none.
    """
    refusals: Counter[str] = Counter()
    plans = list(_plans_of_length(request, request.load.seq_len, refusals))
    if not plans:
        raise _nothing_divides(request, refusals)
    return plans


def length_note(request: Request) -> str:
    """A sentence on the context-parallel sizes that only the sequence length excludes; empty where it excludes none."""
    seq_len, least = request.load.seq_len, {}
    for plan in _ways_of_any_length(request):
        least[plan.cp] = min(plan.length_multiple, least.get(plan.cp, plan.length_multiple))
    possible = {cp: multiple for cp, multiple in sorted(least.items()) if multiple <= seq_len}
    longer: dict[int, list[str]] = {}
    for cp, multiple in possible.items():
        if seq_len % multiple:
            longer.setdefault(-(-seq_len // multiple) * multiple, []).append(str(cp))
    if not longer:
        return ""
    divided = ", ".join(str(cp) for cp, multiple in possible.items() if seq_len % multiple == 0)
    told = ", ".join(f"{length} over cp {' and '.join(sizes)}" for length, sizes in sorted(longer.items()))
    return f"{seq_len} tokens divide over {f'cp {divided} only' if divided else 'no cp'}; the next lengths are {told}."


def _lengths_that_fit(request: Request) -> list[int]:
    """The nearest shorter and the nearest longer sequence that fit, of those that more sizes divide."""
    seq_len, found = request.load.seq_len, {}
    multiples = {plan.length_multiple for plan in _ways_of_any_length(request)}
    around = {(seq_len // each + more) * each for each in multiples if seq_len % each for more in (0, 1)}
    for length in sorted(around - {0}, key=lambda length: abs(length - seq_len)):
        if (length > seq_len) not in found:
            plans = _plans_of_length(request, length, Counter())
            if any(request.fits(memory_of(request.model, plan)) for plan in plans):
                found[length > seq_len] = length
    return sorted(found.values())


def _ways_of_any_length(request: Request) -> Iterator[Plan]:
    """Parallel sizes and layouts that the model allows, each at its shortest sequence."""
    for sizes in _parallel_sizes(request):
        for layout in request.layouts:
            multiple = Plan(**sizes, layout=layout, seq_len=1).length_multiple
            for plan in _ways(replace(request, layouts=(layout,)), multiple, sizes, Counter()):
                yield plan
                break


def _plans_of_length(request: Request, seq_len: int, refusals: Counter[str]) -> Iterator[Plan]:
    for sizes in _parallel_sizes(request):
        for way in _ways(request, seq_len, sizes, refusals):
            for recompute in request.recompute:
                for offload in request.offload:
                    yield replace(way, recompute=recompute, offload=offload)


def _parallel_sizes(request: Request) -> Iterator[dict[str, int]]:
    """Every ``tp * cp * pp * dp`` of the GPUs that keeps to the fixed sizes."""

    def sizes_of(name: str, total: int) -> list[int]:
        return [size for size in _divisors(total) if request.fixed.get(name, size) == size]

    for tp in sizes_of("tp", request.gpus):
        for cp in sizes_of("cp", request.gpus // tp):
            for pp in sizes_of("pp", request.gpus // tp // cp):
                dp = request.gpus // tp // cp // pp
                if request.fixed.get("dp", dp) == dp:
                    yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp}


def _ways(request: Request, seq_len: int, sizes: dict[str, int], refusals: Counter[str]) -> Iterator[Plan]:
    """Layouts and schedules for these sizes; one of each where a single rank holds the sequence."""
    alone = sizes["cp"] == 1
    for layout in request.layouts[:1] if alone else request.layouts:
        for schedule in request.schedules[:1] if alone else request.schedules:
            plan = Plan(
                **sizes,
                seq_len=seq_len,
                node_size=request.node_size,
                global_batch=request.global_batch,
                layout=layout,
                schedule=schedule,
                attention=request.attention,
                index_sharing=request.index_sharing,
                pack_width=request.load.pack_width,
            )
            try:
                check_plan(request.model, plan)
            except ValueError as error:
                refusals[str(error)] += 1
            else:
                yield plan


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _nothing_divides(request: Request, refusals: Counter[str]) -> ValueError:
    fixed = ", ".join(f"{name} {size}" for name, size in request.fixed.items())
    if not refusals:
        return invalid("the fixed sizes", f"factors whose product divides {request.gpus} GPUs", fixed)
    told = " ".join(sentence for sentence, _ in refusals.most_common(3))
    given = f"{request.gpus} GPUs" + (f" with {fixed}" if fixed else "")
    return invalid("the request", "one whose sizes divide", given, told + _remedy_by_length(request))


def _remedy_by_length(request: Request) -> str:
    """Lengths that would fit where the given one does not, and a sentence on what it excludes."""
    lengths, note = " or ".join(map(str, _lengths_that_fit(request))), length_note(request)
    fits = f" A --seq of {lengths} would fit:" if lengths else ""
    return f"{fits} {note}" if note else ""


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
    rule = f"at least {needed:.1f} GiB per GPU at {way}, the least of all plans"
    remedy = (
        f"{needed - request.memory_gib:.1f} GiB are missing; {largest} take {parts[largest] / GIB:.1f} GiB. "
        "More GPUs, a shorter --seq or a smaller model would help."
    )
    remedy += _remedy_by_length(request)
    return invalid("--gpu-memory", rule, f"{request.memory_gib:g} GiB", remedy)
