"""Traces one layer's selection and ring attention, forward and backward, on several GPUs, and says where time goes.

python -m tools.trace.step --ranks 2 --seq-len 131072 --out trace/

Writes a Chrome trace for each rank (open it in Perfetto) and prints its summary. It leaves out the first step of the
trace, in which the GPU waits for launches because none were ahead of it. What the honest meter costs, and the exposed
communication that it measures with events around waits, is printed beside what the trace shows.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_mtraining.config import LAYOUTS, SCHEDULES, MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.ring import ring_attention, start_ring
from megatron_mtraining.sparsity import select_vertical_slash
from megatron_mtraining.telemetry import PairCounter, attention_recall, density, held_out_rows
from megatron_mtraining.transport import create_ring_groups
from megatron_mtraining.transport.exposure import ExposureClock, unexposed

from .summary import activities, read_trace, report, steady, summarise

WARM_UP_STEPS = 4
STEPS_AHEAD = 3
"""That a host launches without ever meeting a full queue."""

RECALL_ROWS = 8
SELECTION = "mtraining selection"
WAYS = ("plain", "counted", "looked at closely")
"""Without the honest meter, as it meters most calls, and as it meters one call of one layer in each log interval."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is traced."""

    ranks: int
    inner_size: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: str
    schedule: str
    max_vertical: int
    max_slash: int
    steps: int
    out: Path


def parsed() -> Options:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--inner-size", type=int, default=0, help="ranks in a node; default all")
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layout", choices=LAYOUTS, default="striped")
    parser.add_argument("--schedule", choices=SCHEDULES, default="hierarchical")
    parser.add_argument("--max-vertical", type=int, default=1024)
    parser.add_argument("--max-slash", type=int, default=120)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("trace"))
    given, present = vars(parser.parse_args()), torch.cuda.device_count()
    if not 1 <= given["ranks"] <= present:
        parser.error(f"--ranks must be 1 to the {present} GPUs present, got {given['ranks']}.")
    return Options(**given | {"inner_size": given["inner_size"] or given["ranks"]})


def do_nothing() -> None:
    """Nobody looks on."""


class Layer:
    """One rank's layer: random queries, keys and values, whose caps decide what is kept."""

    def __init__(self, options: Options) -> None:
        self.config = MTrainingConfig(
            layout=options.layout,
            schedule=options.schedule,
            max_vertical=options.max_vertical,
            max_slash=options.max_slash,
        )
        self.layout = SequenceLayout(
            options.layout, seq_len=options.seq_len, cp_size=options.ranks, node_size=options.inner_size
        )
        groups = create_ring_groups([list(range(options.ranks))], inner_size=options.inner_size)
        self.groups = {
            "inner_group": groups.inner,
            "outer_group": groups.outer,
            "inner_gradient_group": groups.inner_gradient,
            "outer_gradient_group": groups.outer_gradient,
        }
        shape = (1, self.layout.local_len, options.num_heads, options.head_dim)
        kv_shape = (*shape[:2], options.num_kv_heads, options.head_dim)
        self.query, self.key, self.value = (
            torch.randn(each, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for each in (shape, kv_shape, kv_shape)
        )
        self.grad_out = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.rows = held_out_rows(self.config, seq_len=options.seq_len, count=RECALL_ROWS)
        self.observe: Callable[[], None] = do_nothing

    def observed(self, counter: PairCounter, *, with_recall: bool) -> None:
        """What the honest meter does in a call."""
        seq_len, (num_heads, head_dim) = self.layout.seq_len, self.query.shape[2:]
        counter.add(1, self.index, seq_len=seq_len, num_heads=num_heads, head_dim=head_dim)
        if not with_recall:
            return
        with unexposed():
            attention_recall(
                self.query, self.key, self.index, rows=self.rows, layout=self.layout, cp_group=dist.group.WORLD
            )

    def step(self) -> None:
        """Selection, forward and backward."""
        ring = {"cp_group": dist.group.WORLD, "schedule": self.config.schedule, **self.groups}
        with torch.profiler.record_function("mtraining step"):
            start = start_ring(self.key, self.value, **ring)
            with torch.profiler.record_function(SELECTION), torch.no_grad():
                self.index = select_vertical_slash(
                    self.query, self.key, self.config,
                    layout=self.layout, cp_group=ring["cp_group"], meanwhile=start.post,
                )  # fmt: skip
            self.observe()
            with torch.profiler.record_function("mtraining forward"):
                out = ring_attention(
                    self.query, self.key, self.value, self.index, layout=self.layout, start=start, **ring
                ).out
            with torch.profiler.record_function("mtraining backward"):
                torch.autograd.grad(out, (self.query, self.key, self.value), self.grad_out)


def trace(rank: int, store: str, options: Options) -> None:
    """One rank's whole run."""
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    layer = Layer(options)
    for _ in range(WARM_UP_STEPS):
        layer.step()
    for _ in range(2):  # the first round warms up
        times = {way: measured(layer, 4 * options.steps, way) for way in WAYS}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(1 + options.steps):
            layer.step()
        torch.cuda.synchronize()
    path = options.out / f"rank{rank}.json"
    profiler.export_chrome_trace(str(path))
    kept = float(density(layer.index, seq_len=options.seq_len).mean())
    path.with_suffix(".figures.json").write_text(json.dumps({"kept": kept, "times": times}))
    dist.destroy_process_group()


def measured(layer: Layer, steps: int, way: str) -> tuple[float, float, float]:
    """Milliseconds of a step in one of ``WAYS``, of its waits where they are measured, and of the host for it."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock, counter = ExposureClock(), PairCounter()
    dist.barrier()
    torch.cuda.synchronize()
    if way != "plain":
        clock.start()
        layer.observe = functools.partial(layer.observed, counter, with_recall=way == "looked at closely")
    start.record()
    began = time.perf_counter()
    for step in range(steps):
        layer.step()
        if step + 1 == STEPS_AHEAD:
            host_ms = (time.perf_counter() - began) * 1000.0 / STEPS_AHEAD
    stop.record()
    clock.stop()
    layer.observe = do_nothing
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / steps, clock.take_ms() / steps, host_ms


def main() -> None:
    """Traces and prints."""
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(trace, args=(f"{folder}/store", options), nprocs=options.ranks)
    print(options)
    for rank in range(options.ranks):
        path = options.out / f"rank{rank}.json"
        figures = json.loads(path.with_suffix(".figures.json").read_text())
        title = f"rank {rank}: kept {100 * figures['kept']:.2f} %"
        for way, (step_ms, exposed_ms, host_ms) in figures["times"].items():
            waits = f"of them waits {exposed_ms:.3f} ms; the host launches it in {host_ms:.3f} ms"
            print(f"rank {rank}, without profiler, {way}: {step_ms:.3f} ms a step, {waits}")
        events = read_trace(path)
        found = steady(activities(events), events, SELECTION)
        print(report(summarise(found), title=title, steps=options.steps))


if __name__ == "__main__":
    main()
