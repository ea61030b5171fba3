"""``mtraining trace layer``: one layer's selection and ring attention, forward and backward, on several GPUs."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from ...arguments import CommandParser
from ...config import LAYOUTS, SCHEDULES
from ...console import print_lines, whole_number
from ...metrics import PairCounter, density
from ...transport import RingGroups, create_ring_groups
from ...transport.exposure import ExposureClock
from ..stopwatch import Stopwatch
from .emulated_ring import check_emulated, groups_of_large_ring, groups_of_present
from .layer import SELECTION, Layer, Options, do_nothing
from .phases import measure_phases, table
from .summary import activities, read_trace, report, steady, summarise

WARM_UP_STEPS = 4
MODES = ("plain", "counted", "sampled")
"""Runs without the meter, as the meter counts most calls, and as it samples one call of a layer per interval."""

_DESCRIPTION = """\
Prints the time of each phase of a layer on the host and on the GPU, and which of the two is slower. Then writes a
Chrome trace for each rank (for Perfetto) and prints its summary, which begins with the second step: in the first one
the GPU waits for launches, because none were ahead of it. The cost of the meter, and the exposed communication that it
measures, are printed beside the summary. --steps 0 skips all but the phases.

  mtraining trace layer --ranks 2 --seq-len 131072 --out trace/
  mtraining trace layer --ranks 2 --as-part-of 8 32 --inner-size 8 --seq-len 524288 --schedule flat gather

With --as-part-of every GPU emulates one rank of a larger ring (emulated_ring.py), for each number of
ranks and each schedule, with an index that is drawn as the planner draws one; 0 is the ring of the GPUs present."""


def parsed(argv: Sequence[str]) -> list[Options]:
    """Return the command line's runs."""
    parser = CommandParser(prog="mtraining trace layer", description=_DESCRIPTION)
    add, size = parser.add_argument, whole_number(1, 2**26)
    add("--ranks", type=int, default=torch.cuda.device_count())
    add("--as-part-of", type=int, nargs="+", default=[0], help="ranks of larger rings to emulate one of")
    add("--inner-size", type=int, default=0, help="most ranks in a node; default all")
    add("--seq-len", type=size, default=131072)
    add("--num-heads", type=size, default=16)
    add("--num-kv-heads", type=size, default=2)
    add("--head-dim", type=size, default=128)
    add("--layout", choices=LAYOUTS, default="striped")
    add("--schedule", choices=SCHEDULES, nargs="+", default=["hierarchical"])
    add("--max-vertical", type=size, default=1024)
    add("--max-slash", type=size, default=120)
    add("--steps", type=whole_number(0, 1000), default=3, help="in the trace")
    add("--out", type=Path, default=Path("trace"))
    given, present = vars(parser.parse_args(argv)), torch.cuda.device_count()
    if not 1 <= given["ranks"] <= present:
        parser.error(f"--ranks must be 1 to the {present} GPUs present, got {given['ranks']}.")
    if min(given["as_part_of"]) < 0:
        parser.error(f"--as-part-of must be ranks of a ring, or 0, got {min(given['as_part_of'])}.")
    runs = [
        Options(**given | {"as_part_of": size, "inner_size": min(given["inner_size"] or most, most), "schedule": kind})
        for size in given["as_part_of"]
        for most in [size or given["ranks"]]
        for kind in given["schedule"]
    ]
    try:
        for run in runs:
            check_emulated(run.ranks if run.as_part_of else 1, size=run.cp_size, inner_size=run.inner_size)
            run.token_layout()
    except ValueError as error:
        parser.error(str(error))
    return runs


def trace(rank: int, store: str, runs: Sequence[Options]) -> None:
    """Run one rank."""
    first = runs[0]
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=first.ranks)
    stopwatch = Stopwatch(torch.device("cuda", rank))
    present = groups_of_present(first.ranks)
    for options in runs:
        torch.manual_seed(rank)
        layer = Layer(options, _ring(options, present), torch.device("cuda", rank))
        for _ in range(WARM_UP_STEPS):
            layer.step()
        phases = measure_phases(layer, stopwatch)
        share = float(density(layer.index, seq_len=options.seq_len).mean())
        title = f"rank {rank} of {options.ring_text}, density {100 * share:.2f} %"
        print_lines([title, *table(phases)])
        if options.steps:
            _trace_steps(layer, options, trace_path(options, rank), stopwatch)
    dist.destroy_process_group()


def _ring(options: Options, present: RingGroups) -> RingGroups:
    """Return the groups of a larger ring, or of the ranks present."""
    if options.as_part_of:
        return groups_of_large_ring(present, size=options.as_part_of, inner_size=options.inner_size)
    groups = create_ring_groups([list(range(options.ranks))], inner_size=options.inner_size)
    assert groups is not None, "this rank is in the group of all ranks"
    return groups


def _trace_steps(layer: Layer, options: Options, path: Path, stopwatch: Stopwatch) -> None:
    """Write a trace, and the cost of the meter, which needs all ranks of a ring."""
    times = {}
    for _ in range(0 if options.as_part_of else 2):  # the first time warms up
        times = {mode: measured(layer, 4 * options.steps, mode, stopwatch) for mode in MODES}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(1 + options.steps):
            layer.step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    path.with_suffix(".times.json").write_text(json.dumps(times))


def trace_path(options: Options, rank: int) -> Path:
    """Return the path of a rank's trace."""
    ring = f"{options.cp_size}{'_emulated' if options.as_part_of else ''}_{options.schedule}"
    return options.out / f"{ring}_rank{rank}.json"


def measured(layer: Layer, steps: int, mode: str, stopwatch: Stopwatch) -> tuple[float, float]:
    """Return milliseconds of a step in one of ``MODES``, and of its waits where they are measured."""
    clock, counter = ExposureClock(), PairCounter()
    stopwatch.settle()
    dist.barrier()
    stopwatch.settle()
    if mode != "plain":
        clock.start()
        layer.observe = functools.partial(layer.observed, counter, with_recall=mode == "sampled")
    start = stopwatch.mark()
    for _ in range(steps):
        layer.step()
    stop = stopwatch.mark()
    clock.stop()
    layer.observe = do_nothing
    stopwatch.settle()
    return stopwatch.ms(start, stop) / steps, clock.take_ms() / steps


def main(argv: Sequence[str]) -> None:
    """Trace and print."""
    runs = parsed(argv)
    runs[0].out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(trace, args=(f"{folder}/store", runs), nprocs=runs[0].ranks)
    for options, rank in itertools.product(runs, range(runs[0].ranks)):
        if options.steps:
            _print_summary(options, rank)


def _print_summary(options: Options, rank: int) -> None:
    path = trace_path(options, rank)
    for mode, (step_ms, exposed_ms) in json.loads(path.with_suffix(".times.json").read_text()).items():
        print(f"rank {rank}, without profiler, {mode}: {step_ms:.3f} ms a step, of them waits {exposed_ms:.3f} ms")
    events = read_trace(path)
    found = steady(activities(events), events, SELECTION)
    print_lines(report(summarise(found), title=f"rank {rank} of {options.ring_text}", steps=options.steps))
