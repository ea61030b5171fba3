"""Trace one layer's selection and ring attention, forward and backward, on several GPUs, and say where time goes.

    python -m tools.trace.step --ranks 2 --seq-len 131072 --out trace/
    python -m tools.trace.step --ranks 2 --as-part-of 8 32 --inner-size 8 --seq-len 524288 --schedule flat gather

Prints what each phase takes the host and the GPU, and which of the two rules. Then writes a Chrome trace for each rank
(open it in Perfetto) and prints its summary. It leaves out the first step of the trace, in which the GPU waits for
launches because none were ahead of it. What the honest meter costs, and the exposed communication that it measures
with events around waits, is printed beside what the trace shows. ``--steps 0`` leaves all but the phases out.

With ``--as-part-of`` every GPU plays one rank of a larger ring (``large_ring.py``), of each number of ranks under each
schedule, for an index that is drawn as the planner draws it; 0 is the ring of the GPUs present.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_mtraining.config import LAYOUTS, SCHEDULES
from megatron_mtraining.metrics import PairCounter, density
from megatron_mtraining.transport import RingGroups, create_ring_groups
from megatron_mtraining.transport.exposure import ExposureClock
from tools.bench.paper.stopwatch import Stopwatch

from .large_ring import check_can_play, groups_of_large_ring, groups_of_present
from .layer import SELECTION, Layer, Options, do_nothing
from .phases import measure_phases, table
from .summary import activities, read_trace, report, steady, summarise

WARM_UP_STEPS = 4
WAYS = ("plain", "counted", "looked at closely")
"""Ways to run: without the honest meter, as it meters most calls, and as it meters one call of a layer per interval."""


def parsed(argv: Sequence[str] | None = None) -> list[Options]:
    """Return the command line's runs."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--as-part-of", type=int, nargs="+", default=[0], help="ranks of larger rings to play one of")
    parser.add_argument("--inner-size", type=int, default=0, help="most ranks in a node; default all")
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layout", choices=LAYOUTS, default="striped")
    parser.add_argument("--schedule", choices=SCHEDULES, nargs="+", default=["hierarchical"])
    parser.add_argument("--max-vertical", type=int, default=1024)
    parser.add_argument("--max-slash", type=int, default=120)
    parser.add_argument("--steps", type=int, default=3, help="in the trace")
    parser.add_argument("--out", type=Path, default=Path("trace"))
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
            check_can_play(run.ranks if run.as_part_of else 1, size=run.cp_size, inner_size=run.inner_size)
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
        kept = f"kept {100 * float(density(layer.index, seq_len=options.seq_len).mean()):.2f} %"
        print("\n".join([f"rank {rank} of {options.ring_text}, {kept}", *table(phases)]), flush=True)
        if options.steps:
            _trace_steps(layer, options, trace_path(options, rank))
    dist.destroy_process_group()


def _ring(options: Options, present: RingGroups) -> RingGroups:
    """Return the groups of a larger ring, or of the ranks present."""
    if options.as_part_of:
        return groups_of_large_ring(present, size=options.as_part_of, inner_size=options.inner_size)
    return create_ring_groups([list(range(options.ranks))], inner_size=options.inner_size)


def _trace_steps(layer: Layer, options: Options, path: Path) -> None:
    """Write a trace, and what the honest meter costs, which needs all ranks of a ring."""
    times = {}
    for _ in range(0 if options.as_part_of else 2):  # the first round warms up
        times = {way: measured(layer, 4 * options.steps, way) for way in WAYS}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(1 + options.steps):
            layer.step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    path.with_suffix(".figures.json").write_text(json.dumps(times))


def trace_path(options: Options, rank: int) -> Path:
    """Return the path of a rank's trace."""
    ring = f"{options.cp_size}{'_played' if options.as_part_of else ''}_{options.schedule}"
    return options.out / f"{ring}_rank{rank}.json"


def measured(layer: Layer, steps: int, way: str) -> tuple[float, float]:
    """Return milliseconds of a step in one of ``WAYS``, and of its waits where they are measured."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock, counter = ExposureClock(), PairCounter()
    dist.barrier()
    torch.cuda.synchronize()
    if way != "plain":
        clock.start()
        layer.observe = functools.partial(layer.observed, counter, with_recall=way == "looked at closely")
    start.record()
    for _ in range(steps):
        layer.step()
    stop.record()
    clock.stop()
    layer.observe = do_nothing
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / steps, clock.take_ms() / steps


def main() -> None:
    """Trace and print."""
    runs = parsed()
    runs[0].out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(trace, args=(f"{folder}/store", runs), nprocs=runs[0].ranks)
    for options, rank in itertools.product(runs, range(runs[0].ranks)):
        if options.steps:
            _print_summary(options, rank)


def _print_summary(options: Options, rank: int) -> None:
    path = trace_path(options, rank)
    for way, (step_ms, exposed_ms) in json.loads(path.with_suffix(".figures.json").read_text()).items():
        print(f"rank {rank}, without profiler, {way}: {step_ms:.3f} ms a step, of them waits {exposed_ms:.3f} ms")
    events = read_trace(path)
    found = steady(activities(events), events, SELECTION)
    print(report(summarise(found), title=f"rank {rank} of {options.ring_text}", steps=options.steps))


if __name__ == "__main__":
    main()
