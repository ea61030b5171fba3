"""One rank, in its namespace: measures its links, then every setting; the first rank writes the results."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mtraining.planner.clock import step_seconds
from megatron_mtraining.ring import ring_schedule
from megatron_mtraining.transport import RingGroups, as_transport, create_ring_groups
from megatron_mtraining.transport.groups import resolve_transports

from .call import (
    DIRECTIONS,
    QUERY_SHARE,
    ROLES,
    SEQ,
    Links,
    MeasuredGroups,
    Setting,
    Sizes,
    WaitKernels,
    run_call,
)
from .network import rate_command

LEAD_SECONDS = 0.01
WARM_UPS = 1
CALIBRATIONS = 11


def main(rank: int, plan: Path) -> None:
    """Run all settings of a plan."""
    request = json.loads(plan.read_text())
    sizes = Sizes(**request["runs"][0]["sizes"])
    # Beside other programs' work a wait would end some milliseconds late: a rank mostly sleeps, so it comes first.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.environ["GLOO_SOCKET_IFNAME"] = "outer"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{plan.parent}/store",
        rank=rank,
        world_size=sizes.num_ranks,
        timeout=timedelta(seconds=120),
    )
    groups = create_ring_groups([list(range(sizes.num_ranks))], inner_size=sizes.node_size)
    runs = [_run(request, Sizes(**each["sizes"]), each["outer_mb_s"], groups) for each in request["runs"]]
    if rank == 0:
        (plan.parent / "result.json").write_text(json.dumps(runs))
    dist.barrier()
    dist.destroy_process_group()


def _run(request: dict[str, Any], sizes: Sizes, outer_mb_s: float, groups: RingGroups) -> dict[str, Any]:
    """Set the rate of the links between nodes, measure the links, and run every setting."""
    dist.barrier()
    subprocess.run(rate_command("outer", outer_mb_s), check=True)
    cpu_start, start, load = time.process_time(), time.monotonic(), os.getloadavg()[0]
    links = measured_links(groups, sizes)
    rows = [
        {**Setting(*each)._asdict(), "repeats": repeats(Setting(*each), sizes, groups, links, request["repeats"])}
        for each in request["settings"]
    ]
    cpu_share = (time.process_time() - cpu_start) / (time.monotonic() - start)
    mean = float(_of_all_ranks([cpu_share]).mean())
    return {"links": asdict(links), "rows": rows, "cpu_share": mean, "load": [load, os.getloadavg()[0]]}


def measured_links(groups: RingGroups, sizes: Sizes) -> Links:
    """Measure transfers of two sizes between all neighbours of a level at once, and fit rate and latency."""
    found = {}
    flat = _of_flat(groups).cp
    for level, group, size in (
        ("inner", groups.inner, sizes.node_size),
        ("outer", groups.outer, sizes.num_nodes),
        ("flat", flat, sizes.num_ranks),
    ):
        seconds = [_exchange_seconds(group, num_bytes) for num_bytes in (sizes.kv_bytes // 2, 2 * sizes.kv_bytes)]
        per_byte = (seconds[1] - seconds[0]) / (1.5 * sizes.kv_bytes)
        is_present = size > 1 and per_byte > 0
        found[f"{level}_mb_s"] = 1e-6 / per_byte if is_present else 1e3
        latency = 1e6 * (seconds[0] - per_byte * (sizes.kv_bytes // 2)) if is_present else 0.0
        found[f"{level}_latency_us"] = max(0.0, latency)
    del found["flat_latency_us"]
    return Links(**found)


def _exchange_seconds(group: Any, num_bytes: int) -> float:
    """Return the median time of one exchange alone, of its slowest rank."""
    tensor, transport, times = torch.zeros(num_bytes, dtype=torch.uint8), as_transport(group), []
    for _ in range(CALIBRATIONS):
        start = common_start()
        if transport.size > 1:
            transport.exchange(tensor).wait()
        times.append(float(_of_all_ranks([time.perf_counter() - start]).max()))
    return statistics.median(times)


def repeats(
    setting: Setting, sizes: Sizes, groups: RingGroups, links: Links, count: int
) -> dict[str, list[dict[str, float]]]:
    """Return milliseconds of each repeat, by direction: of the slowest rank, and the mean rank's waits by role."""
    rank = dist.get_rank()
    schedule = ring_schedule(setting.schedule, cp_rank=rank, cp_size=sizes.num_ranks, inner_size=sizes.node_size)
    work = sizes.work(setting.layout, setting.schedule)
    profile = sizes.profile(links, work, setting)
    seconds = {
        direction: step_seconds(direction, work, profile, ring=sizes.ring(setting.schedule), head_dim=sizes.head_dim)[
            rank
        ].tolist()
        for direction in DIRECTIONS
    }
    kernels, is_flat = WaitKernels(QUERY_SHARE), setting.schedule == "flat"
    shape = (1, SEQ // sizes.num_ranks, 1, sizes.head_dim)
    tensors = tuple(torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    crosses = sizes.num_nodes > 1 and rank % sizes.node_size == 0
    transports = resolve_transports(_of_flat(groups) if is_flat else groups, setting.schedule)
    measured = MeasuredGroups(transports, crosses, time.perf_counter, is_flat)

    def begin(direction: str) -> float:
        kernels.steps = list(seconds[direction])
        return common_start()

    results: dict[str, list[dict[str, float]]] = {direction: [] for direction in DIRECTIONS}
    for repeat in range(WARM_UPS + count):
        for direction, times in run_call(schedule, measured, kernels, tensors, begin).items():
            row = 1e3 * _of_all_ranks([times.end, *(times.waits[role] for role in ROLES)])
            if repeat >= WARM_UPS:
                waits = dict(zip(ROLES, row[:, 1:].mean(0).tolist(), strict=True))
                results[direction].append({"ms": float(row[:, 0].max()), **waits})
    return results


_flat_groups: list[RingGroups] = []


def _of_flat(groups: RingGroups) -> RingGroups:
    """Return groups of one ring of all ranks, with one of their own for gradients; made once, by all ranks together."""
    if not _flat_groups:
        gradient = dist.new_group(list(range(dist.get_world_size())))
        _flat_groups.append(RingGroups(cp=groups.cp, inner_gradient=gradient))
    return _flat_groups[0]


def common_start() -> float:
    """Wait until a time that all ranks have agreed on and return it: they share the machine's clock."""
    latest = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    start = float(latest) + LEAD_SECONDS
    if (left := start - time.perf_counter()) > 0:
        time.sleep(left)
    return start


def _of_all_ranks(numbers: list[float]) -> Tensor:
    """float64 ``[ranks, numbers]``."""
    row = torch.tensor(numbers, dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
