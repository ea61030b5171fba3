"""Run every system of the MTraining paper's comparison on the GPUs present and write tables and figures.

    python -m tools.bench.run --suite paper                      # 1, 2, 4, ... GPUs; 32768 to 524288 tokens
    python -m tools.bench.run --suite paper --gpus 4 --node 2    # as two nodes of two
    python -m tools.bench.run --suite paper --device cpu --gpus 2 --seqs 512 --heads 2 --kv-heads 1 --head-dim 16

Exit status 1: a method was wrong or failed where it should have run. See docs/ablations.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from megatron_mtraining.arguments import CommandParser
from megatron_mtraining.console import check_folder
from megatron_mtraining.errors import invalid

from ..problem import DTYPES, Problem
from ..report import DEFAULT_FOLDER, commit_of_checkout
from . import report
from .balance import balances
from .methods import METHODS, chosen
from .rank import ERRORS, RESULTS, Assignment, run_rank
from .simulated import TOKENS, simulated_rows


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line behind ``--suite paper``."""
    on_gpu = torch.cuda.is_available()
    parser = CommandParser(prog="python -m tools.bench.run --suite paper", description=__doc__)
    known = ", ".join(method.name for method in METHODS)
    parser.add_argument("--methods", default="all", help=f"all, or some of {known}")
    parser.add_argument("--gpus", help="numbers of ranks, comma-separated; default: 1, 2, 4, ... up to those present")
    parser.add_argument("--node", type=int, help="ranks in a node; default: half of four and more, else all")
    parser.add_argument("--seqs", default="32768,131072,524288", help="tokens, comma-separated")
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16" if on_gpu else "fp32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--repeats", type=int, default=5, help="most timed calls of a method at a length")
    parser.add_argument("--longest-s", type=float, default=4.0, help="seconds of timed calls that are enough")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which nothing more is begun")
    parser.add_argument("--simulated-seq", type=int, default=TOKENS, help="tokens of the simulated ring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder; default: docs/benchmarks/paper_hardware_date")
    parser.add_argument("--no-figures", dest="no_plots", action="store_true", help="draw nothing")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Print the tables, write the folder, and return the exit status."""
    began = time.time()
    arguments = parse_arguments(argv)
    try:
        problem = _problem(arguments)
        worlds = _worlds(arguments)
        chosen(arguments.methods)
        seq_lens = _numbers("--seqs", arguments.seqs)
        _check_lengths(seq_lens, worlds)
        check_folder("--output", arguments.output or DEFAULT_FOLDER)
        simulated = _simulated(problem, arguments.simulated_seq)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    results: dict[str, Any] = {"rows": [], "absent": [], "balance": [], "calibrations": [], "simulated": simulated}
    for world_size in worlds:
        found = _run(arguments, problem, seq_lens, world_size, deadline=began + arguments.limit_s)
        for name, entries in found.items():
            results[name] += entries
    results |= _stamp(argv, problem, worlds)
    print("\n".join(report.results_lines(results)))
    folder = arguments.output or DEFAULT_FOLDER / f"paper_{results['hardware'].replace(' ', '')}_{results['date'][:10]}"
    for path in _write(folder, results, draws=not arguments.no_plots):
        print(path)
    for each in results["absent"]:
        print(f"{each['method']}, {each['ranks']} ranks, {each['seq'] or 'all'} tokens: {each['why']}")
    print(f"{time.time() - began:.0f} s")
    return int(any(each["failed"] for each in results["absent"]))


def _problem(arguments: argparse.Namespace) -> Problem:
    for flag, value, least in (("--repeats", arguments.repeats, 1), ("--node", arguments.node, 1)):
        if value is not None and value < least:
            raise invalid(flag, f"at least {least}", value)
    for flag, seconds in (("--longest-s", arguments.longest_s), ("--limit-s", arguments.limit_s)):
        if not 0 < seconds < math.inf:
            raise invalid(flag, "a number of seconds above 0", seconds)
    return Problem(
        seq_len=1,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        dtype=DTYPES[arguments.dtype],
        device=torch.device(arguments.device),
        seed=arguments.seed,
    )


def _simulated(problem: Problem, seq_len: int) -> list[dict[str, Any]]:
    try:
        return list(simulated_rows(problem, seq_len=seq_len))
    except ValueError as error:
        raise ValueError(str(error).replace("seq_len", "--simulated-seq", 1)) from None


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise invalid(flag, "comma-separated whole numbers", repr(text)) from None
    if numbers[0] < 1:
        raise invalid(flag, "at least 1", numbers[0])
    return numbers


def _worlds(arguments: argparse.Namespace) -> tuple[int, ...]:
    present = torch.cuda.device_count() if arguments.device == "cuda" else None
    if arguments.gpus is None:
        worlds = tuple(2**power for power in range((present or 2).bit_length()) if 2**power <= (present or 2))
    else:
        worlds = _numbers("--gpus", arguments.gpus)
    if present is not None and worlds[-1] > present:
        raise invalid("--gpus", f"up to the {present} present", worlds[-1])
    for world_size in worlds:
        if world_size % _node_size(arguments, world_size):
            raise invalid("--node", f"a divisor of {world_size} ranks", arguments.node)
    return worlds


def _node_size(arguments: argparse.Namespace, world_size: int) -> int:
    if arguments.node is not None:
        return min(arguments.node, world_size)
    return world_size // 2 if world_size >= 4 and world_size % 2 == 0 else world_size


def _listed(numbers: tuple[int, ...]) -> str:
    return " and ".join(map(str, numbers))


def _check_lengths(seq_lens: tuple[int, ...], worlds: tuple[int, ...]) -> None:
    multiple = 128 * math.lcm(*worlds)
    for seq_len in seq_lens:
        if seq_len % multiple or seq_len < 256:
            raise invalid("--seqs", f"multiples of {multiple} from 256 on for {_listed(worlds)} ranks", seq_len)


def _run(
    arguments: argparse.Namespace, problem: Problem, seq_lens: tuple[int, ...], world_size: int, *, deadline: float
) -> dict[str, list[dict[str, Any]]]:
    """Run all methods on one number of ranks, each a process."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        assignment = Assignment(
            problem=problem,
            seq_lens=seq_lens,
            methods=arguments.methods,
            world_size=world_size,
            node_size=_node_size(arguments, world_size),
            repeats=arguments.repeats,
            longest_s=arguments.longest_s,
            deadline=deadline,
            folder=folder,
        )
        died = _spawn(assignment, str(folder / "store"))
        found: dict[str, Any] = {"rows": [], "absent": []}
        if (folder / RESULTS).exists():  # what was measured before a rank died is kept
            found = json.loads((folder / RESULTS).read_text())
        if died is not None:
            where = {"ranks": world_size, "seq": None, "method": "what would have followed"}
            found["absent"] += [*first_error(folder), {**where, "why": died, "failed": True}]
        compared = report.metrics_of(list(balances(found, problem, folder)))
    named = ("steps", "calls", "sm_mhz", "index", "calibration")
    rows = [{name: value for name, value in row.items() if name not in named} for row in found["rows"]]
    where = ("ranks", "seq", "method")
    calibrations = [
        {**{name: row[name] for name in where}, **row["calibration"]} for row in found["rows"] if "calibration" in row
    ]
    return {"rows": rows, "absent": found["absent"], "balance": compared, "calibrations": calibrations}


def first_error(folder: Path) -> list[dict[str, Any]]:
    """Return what the first rank raised of those that wrote it down and could not tell the others, as absent method."""
    files = sorted(folder.glob(ERRORS.format(rank="*")), key=lambda file: file.stat().st_mtime_ns)
    return [json.loads(file.read_text()) for file in files[:1]]


def _spawn(assignment: Assignment, store: str) -> str | None:
    """Run the ranks; return the last line of what ended them too early, or None."""
    multiprocessing.set_forkserver_preload([run_rank.__module__])  # torch is imported once for all ranks
    try:
        torch.multiprocessing.start_processes(
            run_rank, args=(store, assignment), nprocs=assignment.world_size, start_method="forkserver"
        )
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        return str(error).strip().splitlines()[-1]
    return None


def _stamp(argv: list[str], problem: Problem, worlds: tuple[int, ...]) -> dict[str, str]:
    """Return what the numbers depend on; not where they went."""
    name = torch.cuda.get_device_name(0).replace("NVIDIA ", "") if problem.device.type == "cuda" else "cpu"
    named = [text for at, text in enumerate(argv) if "--output" not in (text, argv[max(at - 1, 0)])]
    heads = f"{problem.num_heads}/{problem.num_kv_heads} heads, head_dim {problem.head_dim}"
    return {
        "command": shlex.join(["python", "-m", "tools.bench.run", "--suite", "paper", *named]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": f"{max(worlds)} x {name.lower()}",
        "torch": torch.__version__,
        "commit": commit_of_checkout(),
        "problem": f"{heads}, {next(key for key, dtype in DTYPES.items() if dtype == problem.dtype)}",
    }


def _write(folder: Path, results: dict[str, Any], *, draws: bool) -> list[Path]:
    """Write the file, the page, and the figures where matplotlib is there."""
    folder.mkdir(parents=True, exist_ok=True)
    text, written = report.page(results), [folder / "results.json", folder / "README.md"]
    pictures = _draw(folder, results) if draws else []
    text += "".join(f"\n![{picture.stem}]({picture.name})" for picture in pictures) + "\n" * bool(pictures)
    written[0].write_text(json.dumps(results, indent=1) + "\n")
    written[1].write_text(text)
    return [*written, *pictures]


def _draw(folder: Path, results: dict[str, Any]) -> list[Path]:
    try:
        from . import figures
    except ModuleNotFoundError:
        print("No figures: matplotlib is not installed.")
        return []
    paths = []
    if results["rows"]:
        paths.append(folder / "throughput.png")
        figures.draw_throughput(results["rows"], paths[-1])
    shapes = [each for each in results["balance"] if each["ranks"] > 1]
    if shapes:
        paths.append(folder / "steps.png")
        largest = max((each["ranks"], each["seq"]) for each in shapes)
        figures.draw_steps([each for each in shapes if (each["ranks"], each["seq"]) == largest], paths[-1])
    return paths
