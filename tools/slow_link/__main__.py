"""Time ring attention on one machine whose nodes are network namespaces behind slow links: python -m tools.slow_link.

    sudo python -m tools.slow_link                         # 2 nodes of 2 ranks, 1/4 and 1/12 of the inner rate: minutes
    sudo python -m tools.slow_link --nodes 2 --node-size 4 --shares 12 --layouts striped

Makes namespaces, links and token buckets (ip, tc: needs root), runs, and takes them down, with whatever a run that was
ended has left. Keys, values and gradients travel by gloo through the ring's own code; kernels are timed waits as long
as the pairs of a drawn index take, so that the ratio of an outer transfer to the compute of a node's keys is given.
Beside each row are the planner's prediction with the measured links, and the bound.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron_mtraining.arguments import CommandParser
from megatron_mtraining.config import LAYOUTS, SCHEDULES
from megatron_mtraining.console import check_folder, list_of, number, print_lines, text_table, whole_number
from megatron_mtraining.errors import InvalidError

from .call import DIRECTIONS, ROLES, SEQ, Links, Setting, Sizes, predictions
from .network import Network, check_machine, namespace, set_up

OUTER_SECONDS = 0.025
"""Time of one outer transfer at the rate that is set, which sets its bytes: long beside what a busy host delays."""

RANK_TIMEOUT_S = 1500
HEADINGS = (
    *("1/", "ratio", "schedule", "layout", "direction", "ms", "predicted", "error %", "bound"),
    *("inner %", "outer keys %", "outer grads %", "predicted: inner", "keys", "grads"),
)
LEGEND = """\
ms: the slowest rank's, median. inner, outer keys, outer grads: exposed, mean rank's waits in % of ms (median), for
transfers from the same node, for keys and for gradients from another one. bound: the larger of the busiest rank's
compute and of what the busiest link carries at its measured rate. 1/: outer rate, share of the inner one."""


def parse_arguments(argv: Sequence[str] | None) -> Any:
    """Parse the command line."""
    parser = CommandParser(prog="python -m tools.slow_link", description=__doc__)
    add = parser.add_argument
    add("--nodes", type=whole_number(2, 4), default=2, help="nodes (2)")
    add("--node-size", type=whole_number(1, 4), default=2, help="ranks in a node (2)")
    add("--inner-mb-s", type=number(1, 1e4), default=24.0, help="rate of a rank's link inside its node (24)")
    add("--shares", type=list_of(whole_number(1, 100)), default=[4, 12], help="inner over outer rate (4,12)")
    add("--ratios", type=list_of(number(1e-2, 100)), default=[0.5, 1.0, 2.0], help="outer transfer / inner compute")
    add("--schedules", type=list_of(str, SCHEDULES), default=["hierarchical", "flat", "gather"])
    add("--layouts", type=list_of(str, LAYOUTS), default=["striped", "node_striped", "zigzag"])
    add("--repeats", type=whole_number(1, 1000), default=20, help="of which the median is printed (20)")
    add("--output", type=Path, default=Path("outputs/slow_link"), help="folder of slow_link.json")
    return parser, parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Set up, run, take down, and print the table."""
    parser, options = parse_arguments(argv)
    try:
        check_folder("--output", options.output)
        check_machine()
        print_lines(_lines(options))
    except ValueError as error:
        parser.error(str(error))


def sizes_of(options: Any, outer_mb_s: float) -> Sizes:
    """Return sizes whose keys take :data:`OUTER_SECONDS` between nodes."""
    tokens = SEQ // (options.nodes * options.node_size)
    head_dim = max(1, round(1e6 * outer_mb_s * OUTER_SECONDS / (4 * tokens)))
    return Sizes(num_nodes=options.nodes, node_size=options.node_size, head_dim=head_dim)


def _lines(options: Any) -> Iterator[str]:
    settings = [Setting(*each) for each in product(options.layouts, options.schedules, options.ratios)]
    settings.sort(key=lambda each: (each.ratio, options.schedules.index(each.schedule)))
    written = {"machine": _machine(), "runs": []}
    yield f"{options.nodes} nodes of {options.node_size}; {written['machine']}"
    yield LEGEND
    rates = [options.inner_mb_s / share for share in options.shares]
    network = Network(
        num_nodes=options.nodes, node_size=options.node_size, inner_mb_s=options.inner_mb_s, outer_mb_s=rates[0]
    )
    runs = [{"sizes": asdict(sizes_of(options, rate)), "outer_mb_s": rate} for rate in rates]
    results = _run(network, {"runs": runs, "settings": settings, "repeats": options.repeats})
    rows = []
    for share, run, result in zip(options.shares, runs, results, strict=True):
        sizes, links = Sizes(**run["sizes"]), Links(**result["links"])
        yield (
            f"1/{share}: set {options.inner_mb_s:g} and {run['outer_mb_s']:g} MB/s, measured {links.inner_mb_s:.1f} "
            f"and {links.outer_mb_s:.2f}, in the flat ring {links.flat_mb_s:.2f}; latency {links.inner_latency_us:.0f} "
            f"and {links.outer_latency_us:.0f} us; {sizes.kv_bytes} bytes of keys and values, "
            f"{1e3 * links.outer_seconds(sizes.kv_bytes):.1f} ms between nodes; load {result['load'][0]:.1f} to "
            f"{result['load'][1]:.1f}; a rank uses {result['cpu_share']:.0%} of a core"
        )
        written["runs"].append({"share": share, **run, **result})
        for row in result["rows"]:
            rows += [[str(share), *cells] for cells in cells_of(row, sizes, links)]
    yield from ("", *text_table(HEADINGS, rows))
    path = options.output / "slow_link.json"
    path.write_text(
        json.dumps(written | {"table": [dict(zip(HEADINGS, row, strict=True)) for row in rows]}, indent=1) + "\n"
    )
    yield str(path)


def cells_of(row: dict[str, Any], sizes: Sizes, links: Links) -> Iterator[list[str]]:
    """Yield the cells of both directions of a setting, measured beside predicted."""
    setting = Setting(row["layout"], row["schedule"], row["ratio"])
    predicted = predictions(sizes, setting, links)
    for direction in DIRECTIONS:
        repeats, expected = row["repeats"][direction], predicted[direction]
        ms = statistics.median(each["ms"] for each in repeats)
        shares = {role: statistics.median(100 * each[role] / each["ms"] for each in repeats) for role in ROLES}
        of_prediction = {role: 100 * waited / expected.ms for role, waited in expected.waits_ms.items()}
        yield [
            *(f"{setting.ratio:g}", setting.schedule, setting.layout, direction),
            *(f"{ms:.1f}", f"{expected.ms:.1f}", f"{100 * (expected.ms / ms - 1):+.1f}", f"{expected.bound_ms:.1f}"),
            *(
                f"{cell:.1f}"
                for each in (shares, of_prediction)
                for cell in (each["inner"] + each["inner_gradient"], each["outer"], each["outer_gradient"])
            ),
        ]


def _run(network: Network, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the ranks measured, a run for each outer rate."""
    with tempfile.TemporaryDirectory() as folder, set_up(network):
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps(request))
        ranks = [_start(rank, plan) for rank in range(network.num_ranks)]
        try:
            for process in ranks:
                process.wait(timeout=RANK_TIMEOUT_S)
        finally:
            for process in ranks:
                process.kill()
        if any(process.returncode for process in ranks):
            log = next(Path(folder, f"{rank}.log") for rank, each in enumerate(ranks) if each.returncode)
            raise InvalidError(f"every rank must succeed, got {log.read_text()[-500:]}")
        return json.loads((Path(folder) / "result.json").read_text())


def _start(rank: int, plan: Path) -> subprocess.Popen[bytes]:
    inside = ["ip", "netns", "exec", namespace(rank), sys.executable, "-m"]
    with plan.with_name(f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*inside, "tools.slow_link.rank", str(rank), str(plan)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def _machine() -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    software = f"Linux {platform.release()}, torch {torch.__version__}"
    return f"{now}, {os.cpu_count()} cores, {software}, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
