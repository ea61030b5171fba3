"""``mtraining profile``: rates of this machine as one JSON file, for planner, replay and ``auto``."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...arguments import CommandParser
from ...console import check_file, print_lines, text_table, whole_number
from ...errors import invalid
from ...planner.profile import NUMBERS, Profile, device_name, load_profile, profile_of_machine
from ...transport import create_ring_groups
from ...transport.groups import gather_placement
from ...transport.process_group import gather_numbers
from ..stopwatch import Stopwatch
from ..trace.emulated_ring import groups_of_present
from .rates import Sizes, Timer, host_costs, kernel_rates, link_rates, machine_rates

_DESCRIPTION = """\
Measures this machine and writes a profile: links by level, products, memory, attention kernels, selection, and what
launches take the host. One process measures one device; torchrun measures links too, between all its ranks:

  mtraining profile --output machine.json
  torchrun --nproc-per-node 8 ... -m megatron_mtraining profile --output machine.json

A number that this run cannot have is taken from --base, and the profile's source says which. Then:

  mtraining plan --profile machine.json ...      mtraining balance --profile machine.json ...
  --mtraining-profile machine.json               (by it --mtraining-layout auto and --mtraining-schedule auto decide)"""


def main(argv: Sequence[str]) -> None:
    """Measure, print a table, and write the file."""
    parser = CommandParser(prog="mtraining profile", description=_DESCRIPTION)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    add("--base", default="auto", help="profile of what is not measured: a name or a file (that of the GPU's name)")
    add("--node-size", type=whole_number(1, 4096), help="ranks in a node, found from the host names by default")
    options = parser.parse_args(argv)
    try:
        check_file("--output", options.output)
        base = profile_of_machine("auto") if options.base == "auto" else (options.base, load_profile(options.base))
        with _process_group() as device:
            profile = measured(device, *base, node_size=options.node_size, command=shlex.join(argv))
            if dist.get_rank() == 0:
                options.output.write_text(json.dumps(asdict(profile), indent=1) + "\n")
                print_lines([*_table(profile, *base), profile.source, str(options.output)])
    except ValueError as error:
        parser.error(str(error))


def measured(
    device: torch.device, base_name: str, base: Profile, *, node_size: int | None = None, command: str = ""
) -> Profile:
    """Return the profile of the job's ranks: means over them. A collective.

    Raises:
        ValueError: ``node_size`` does not divide the ranks.
    """
    ranks = dist.get_world_size()
    placement = gather_placement(dist.group.WORLD, plan="mtraining profile")
    node_size = node_size or placement.inner_size()
    if ranks % node_size:
        raise invalid("--node-size", f"a divisor of the {ranks} ranks", node_size)
    sizes = Sizes.of(device)
    timer = Timer(Stopwatch(device), sizes.repeats, sizes.busy_s)
    groups = create_ring_groups([list(range(ranks))], inner_size=node_size)
    own = link_rates(groups, timer) | kernel_rates(sizes, timer) | machine_rates(sizes, timer)
    own |= host_costs(sizes, timer, groups_of_present(ranks), ranks)
    found = dict(zip(own, gather_numbers(list(own.values())).mean(0).tolist(), strict=True))
    assumed = ", ".join(name for name in NUMBERS if name not in found) or "nothing"
    nodes = ranks // node_size
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    source = (
        f"mtraining profile {command}, {now}: {device_name()}, {ranks} ranks on {nodes} nodes, torch "
        f"{torch.__version__}; launches: rings emulated on these ranks. From the profile {base_name}: {assumed}."
    )
    return replace(base, **found, gpu=device_name(), ranks=ranks, nodes=nodes, source=source)


def _table(profile: Profile, base_name: str, base: Profile) -> list[str]:
    rows = [[name, f"{getattr(profile, name):.4g}", f"{getattr(base, name):.4g}"] for name in NUMBERS]
    return text_table(("", "measured", base_name), rows)


@contextmanager
def _process_group() -> Iterator[torch.device]:
    """Join the ranks that torchrun started, or be the only one."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        alone = {} if "RANK" in os.environ else {"init_method": f"file://{folder}/store", "rank": 0, "world_size": 1}
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5), **alone)
        try:
            yield device
        finally:
            dist.destroy_process_group()
