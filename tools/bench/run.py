"""Measure vertical-slash attention beside its peers: on the same inputs, checked against float64 before it is timed.

    python -m tools.bench.run --op attention --seq 131072 --heads 16 --kv-heads 2 --head-dim 128 --dtype bf16
    python -m tools.bench.run --op forward --index clustered --baselines mtraining-sm90,cudnn
    python -m tools.bench.run --op attention --index tools/bench/data/tiny_gpt.json
    python -m tools.bench.run --op attention --index-sharing kv_group
    python -m tools.bench.run --op attention --index planted --slash-run-lengths 1,2,4
    python -m tools.bench.run --op attention --densities 2,5,10,20,25,40
    python -m tools.bench.run --suite paper --help

The exit status is 1 when a baseline is wrong or fails; no speed is given for it then.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch

from megatron_mtraining.arguments import CommandParser
from megatron_mtraining.config import INDEX_SHARINGS, MTrainingConfig
from megatron_mtraining.console import check_file
from megatron_mtraining.errors import invalid
from megatron_mtraining.metrics import Recording
from megatron_mtraining.selection import ESTIMATORS
from megatron_mtraining.types import VerticalSlashIndex

from . import baselines  # noqa: F401  (registers them)
from .clock import Timing
from .indices import IndexShape, index_of_density, synthetic_index
from .measure import OPERATIONS, measure_case
from .planted import planted_case
from .problem import DTYPES, Inputs, Problem
from .registry import REGISTRY, chosen
from .report import LEGEND, case_lines, default_path, stamp, write_json
from .routines import selection_config

RUNS = {"random": 1, "clustered": 16}
"""Neighbours in a run of distances or columns."""

FEWEST_REPEATS_ON_GPU = 20

Number = TypeVar("Number", int, float)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(prog="python -m tools.bench.run", description=__doc__)
    shape = IndexShape()
    subject = parser.add_argument_group("subject of the measurement")
    subject.add_argument("--op", choices=("attention", *OPERATIONS), default="attention", help="attention: all four")
    subject.add_argument("--baselines", default="all", help=f"all, or some of {', '.join(REGISTRY)}")
    subject.add_argument("--repeats", type=int, default=FEWEST_REPEATS_ON_GPU, help="timed calls of each baseline")
    subject.add_argument("--longest-s", type=float, help="seconds of timed calls that are enough for one baseline")
    subject.add_argument("--rest-ms", type=float, default=0.0, help="idle time before each timed call")
    selection = parser.add_argument_group("selection", "by default Algorithm 1, with lists as long as those below")
    selection.add_argument("--budget", choices=("cost", "top_p"), default="top_p")
    selection.add_argument("--estimator", choices=ESTIMATORS.names, help="default: the budget's")
    selection.add_argument("--num-probe-rows", type=int, help="default: the budget's")
    selection.add_argument("--num-probe-windows", type=int, help="default: the budget's; last_window has none")
    selection.add_argument("--max-density", type=float, help="cost: most of the causal pairs")
    size = parser.add_argument_group("sizes")
    size.add_argument("--seq", type=int, default=131072, help="tokens")
    size.add_argument("--heads", type=int, default=16, help="query heads")
    size.add_argument("--kv-heads", type=int, default=2)
    size.add_argument("--head-dim", type=int, default=128)
    size.add_argument("--batch", type=int, default=1)
    size.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    size.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    size.add_argument("--seed", type=int, default=0)
    index = parser.add_argument_group("index")
    index.add_argument(
        "--index",
        default="random",
        help="random, clustered (runs of 16), planted (selected on a synthetic layer) or a recorded file",
    )
    index.add_argument("--slash-run-lengths", default="1", help="for planted by top_p: a case for each, with commas")
    index.add_argument(
        "--index-sharing", choices=INDEX_SHARINGS, default="head", help="kv_group: heads of a group share a list"
    )
    index.add_argument("--densities", help="comma-separated percentages of the pairs; the distances follow from them")
    index.add_argument("--distances", type=int, default=shape.distances, help="of a list, local ones included")
    index.add_argument("--local", type=int, default=shape.local, help="distances that every head keeps")
    index.add_argument("--verticals", type=int, default=shape.verticals, help="of a list, sinks included")
    index.add_argument("--sinks", type=int, default=shape.sinks, help="leading columns that every head keeps")
    result = parser.add_argument_group("result")
    result.add_argument("--output", type=Path, help="default: docs/benchmarks/theme_hardware_date.json")
    result.add_argument("--commit", help="of the code, where it is not a git checkout")
    return parser.parse_args(argv)


def problem_of(arguments: argparse.Namespace) -> Problem:
    """Return the sizes that were asked for."""
    if arguments.device == "cuda" and arguments.repeats < FEWEST_REPEATS_ON_GPU:
        raise invalid("--repeats", f"at least {FEWEST_REPEATS_ON_GPU} on a GPU", arguments.repeats)
    if arguments.repeats < 1:
        raise invalid("--repeats", "at least 1", arguments.repeats)
    if not 0 <= arguments.rest_ms < math.inf:
        raise invalid("--rest-ms", "a number of milliseconds from 0 on", arguments.rest_ms)
    if arguments.longest_s is not None and not 0 < arguments.longest_s < math.inf:
        raise invalid("--longest-s", "a number of seconds above 0", arguments.longest_s)
    return Problem(
        seq_len=arguments.seq,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        dtype=DTYPES[arguments.dtype],
        device=torch.device(arguments.device),
        batch=arguments.batch,
        seed=arguments.seed,
        index_sharing=arguments.index_sharing,
    )


def shape_of(arguments: argparse.Namespace) -> IndexShape:
    """Return the lists that were asked for."""
    return IndexShape(
        distances=arguments.distances,
        local=arguments.local,
        verticals=arguments.verticals,
        sinks=arguments.sinks,
        run=RUNS.get(arguments.index, 1),
    )


def cases_of(
    arguments: argparse.Namespace, problem: Problem, shape: IndexShape
) -> Iterator[tuple[str, Inputs, VerticalSlashIndex, MTrainingConfig]]:
    """Yield label, tensors and index of each case, and the configuration of its selection."""
    fields = ("budget", "estimator", "num_probe_rows", "num_probe_windows", "max_density", "index_sharing")
    given = {field: value for field in fields if (value := getattr(arguments, field)) is not None}
    lengths = _numbers("--slash-run-lengths", arguments.slash_run_lengths, int)
    if arguments.densities is not None and arguments.index not in RUNS:
        raise invalid("--densities", "given with --index random or clustered", f"--index {arguments.index}")
    if lengths != [1] and (arguments.index != "planted" or arguments.budget == "cost"):
        raise invalid("--slash-run-lengths", "1 unless --index is planted, by top_p", arguments.slash_run_lengths)
    if arguments.index == "planted":
        most = shape.distances - shape.local
        for length in lengths:
            if not 1 <= length <= (most or length):
                rule = f"at least 1 and at most {most}, --distances less --local" if most else "at least 1"
                raise invalid("--slash-run-lengths", rule, length)
        for length in lengths:
            runs = {} if length == 1 else {"slash_run_length": length}
            config = selection_config(shape, **runs, **given)
            yield *planted_case(problem, config), config
        return
    for label, index in _drawn_or_recorded(arguments, problem, shape):
        yield label, problem.inputs(), index, selection_config(shape, **given)


def _drawn_or_recorded(
    arguments: argparse.Namespace, problem: Problem, shape: IndexShape
) -> Iterator[tuple[str, VerticalSlashIndex]]:
    if arguments.index not in RUNS:
        if not Path(arguments.index).exists():
            raise invalid("--index", "random, clustered, planted or a file made by tools.bench.record", arguments.index)
        recording = Recording.load(Path(arguments.index))
        factor = problem.seq_len // recording.seq_len
        index = recording.index(
            seq_len=problem.seq_len, num_heads=problem.num_lists, rows=problem.batch, device=problem.device
        )
        yield f"{Path(arguments.index).stem} stretched {factor} times", index
        return
    if arguments.densities is None:
        yield arguments.index, synthetic_index(problem, shape)
        return
    for target in _numbers("--densities", arguments.densities, float):
        yield f"{arguments.index}, {target:g} % wanted", index_of_density(problem, shape, target)


def _numbers(flag: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise invalid(flag, "comma-separated numbers", repr(text)) from None


def run_suite(command: list[str]) -> int:
    """Run the suite that the first word names with the words behind it."""
    if command[:1] != ["paper"]:
        raise SystemExit(str(invalid("--suite", "paper, before any other flag", " ".join(command[:1]) or None)))
    from .paper.suite import main as run_paper

    return run_paper(command[1:])


def main(argv: list[str] | None = None) -> int:
    """Print the tables, write the file, and return the exit status."""
    command = sys.argv[1:] if argv is None else argv
    if command[:1] == ["--suite"]:
        return run_suite(command[1:])
    arguments = parse_arguments(command)
    cases = []
    try:
        problem = problem_of(arguments)
        timing = Timing(repeats=arguments.repeats, longest_s=arguments.longest_s, rest_ms=arguments.rest_ms)
        taking_part = chosen(arguments.baselines)
        if arguments.output is not None:
            check_file("--output", arguments.output)
        shape = shape_of(arguments)
        operations = OPERATIONS if arguments.op == "attention" else (arguments.op,)
        for label, inputs, index, config in cases_of(arguments, problem, shape):
            case = measure_case(
                problem,
                label,
                inputs,
                index,
                operations=operations,
                baselines=taking_part,
                config=config,
                timing=timing,
            )
            cases.append(case)
            print("\n".join(case_lines(problem, case)), flush=True)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"\n{LEGEND}")
    shared = "-kv_group" if arguments.index_sharing == "kv_group" else ""
    budget = "-cost" if arguments.budget == "cost" else ""
    theme = f"{arguments.op}-{Path(arguments.index).stem}{budget}{shared}-{arguments.seq}"
    path = arguments.output or default_path(problem, theme)
    write_json(path, stamp(problem, command, timing=timing, commit=arguments.commit), cases)
    print(path)
    return 1 if any(case.failed for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
