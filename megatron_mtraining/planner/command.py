"""``mtraining plan``: parallel sizes, schedule and memory savers for a model on given GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..arguments import CommandParser
from ..config import INDEX_SHARINGS, LAYOUTS, SCHEDULES, MTrainingConfig
from ..console import num_tokens, number, print_lines, whole_number
from ..errors import invalid
from ..launch_config import read_launch_config
from .attention_clock import load_of_density, load_of_recording
from .model import PRESETS, is_launch_config, model_of
from .plan import MTRAINING, RECOMPUTE, TRANSFORMER_ENGINE
from .profile import PROFILES, load_profile
from .report import report_lines, write_plans
from .search import Request, search

_DESCRIPTION = """\
Proposes parallel sizes, layout, schedule, recomputation and optimizer offload, with predicted memory and time, and the
flags to paste. Nothing runs and no GPU is needed; docs/planner.md has the measured errors.

  mtraining plan --model qwen2.5-3b --seq 512K --gpus 32 --gpu a100 --gpu-memory 40GB --node 8"""

_SIZES = ("tp", "cp", "pp", "dp")
_PROPOSED = [layout for layout in LAYOUTS if layout != "contiguous"]  # which is uneven for every causal attention

_MOST_GPUS, _MOST_TOKENS = 4096, 2**26  # above which the planner would take minutes

_count = whole_number(1, 2**30)
_gpus = whole_number(1, _MOST_GPUS)
_gib = number(0, 1e6, "a size such as 40GB or 79.6GiB, above 0 and up to 1000000GB", unit="GIB|GB|G")
_share = number(0, 1, "a share such as 5% or 0.05, above 0 and up to 100%", unit="%", factor=0.01)
_rate = number(1e-3, 1e6)

_FROM_LAUNCH_CONFIG = (
    "--global-batch-size --micro-batch-size --mtraining-index-sharing --mtraining-max-vertical --mtraining-max-slash"
).split()
"""Flags that a plan takes from a launch config where the command line has no others."""


def main(argv: Sequence[str]) -> None:
    """Print plans; exit with status 2 and one sentence where a request is impossible."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        flags = read_launch_config(options.model).flags if is_launch_config(options.model) else {}
        names = _FROM_LAUNCH_CONFIG[: 3 if options.index else None]
        from_config = [text for flag in names if flag in flags for text in (flag, *flags[flag])]
        options = parser.parse_args([*from_config, *argv])
        request = _request(options)
        candidates = search(request)
        print_lines(report_lines(request, candidates, rows=options.rows))
        if options.json:
            write_plans(options.json, request, candidates)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _parser() -> CommandParser:
    parser = CommandParser(prog="mtraining plan", description=_DESCRIPTION)
    add = parser.add_argument
    names = ", ".join(PRESETS)
    add("--model", required=True, help=f"{names}; a Hugging Face config.json; a launch config of Megatron's flags")
    add("--seq", type=num_tokens(_MOST_TOKENS), required=True, help="tokens in a sequence: 524288, 512K or 1M")
    add("--gpus", type=_gpus, required=True, help="GPUs of all nodes")
    add("--node", type=_gpus, default=8, help="GPUs in a node (8)")
    add("--gpu", default="h200", choices=tuple(PROFILES), help="name of the GPU (h200)")
    add("--profile", metavar="FILE", help="JSON of a Profile's fields, instead of --gpu")
    add("--gpu-memory", type=_gib, metavar="SIZE", help="40GB or 40 (GiB, as GPUs are named); default: the GPU's")
    add("--inner-gb-s", type=_rate, help="overrides the profile: GB/s of a rank inside its node")
    add("--outer-gb-s", type=_rate, help="overrides the profile: GB/s of a rank between nodes")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--density", type=_share, help="share of causal pairs, 5%% or 0.05; 100%%: TransformerEngine's")
    load.add_argument("--index", type=Path, metavar="FILE", help="a recorded index (metrics.Recording)")
    add("--max-vertical", "--mtraining-max-vertical", type=whole_number(0, 2**16), metavar="N", help="cap on verticals")
    add("--max-slash", "--mtraining-max-slash", type=whole_number(0, 2**20), metavar="N", help="cap on slashes")
    add("--global-batch", "--global-batch-size", type=_count, metavar="N", help="sequences in a step; default: --gpus")
    add("--micro-batch-size", type=_count, default=1, help=argparse.SUPPRESS)
    for name in _SIZES:
        add(f"--{name}", type=_gpus, metavar="N", help=f"fixes the {name} size")
    add("--layout", choices=LAYOUTS, help="fixes the layout")
    add("--schedule", choices=SCHEDULES, help="fixes the schedule")
    add("--index-sharing", "--mtraining-index-sharing", choices=INDEX_SHARINGS, help="owner of an index (head)")
    add("--recompute", choices=RECOMPUTE, help="fixes what is computed again")
    add("--no-offload", action="store_true", help="optimizer states remain on the GPU")
    add("--margin", type=number(0, 0.9), default=0.05, help="share of memory left for fragmentation (0.05)")
    add("--rows", type=_count, default=8, help="plans in the table (8)")
    add("--json", type=Path, metavar="FILE", help="writes all plans")
    return parser


def _request(options: argparse.Namespace) -> Request:
    node, is_dense = min(options.node, options.gpus), options.density == 1
    if options.gpus % node:
        raise invalid("--gpus", f"a multiple of the {node} GPUs of a node", options.gpus, "Give --node.")
    sparse = ("layout", "schedule") if is_dense else ()
    caps = ("max_vertical", "max_slash") if options.index else ()
    for other, names in {"--density 100%, which is TransformerEngine's": sparse, "--index": caps}.items():
        for name in names:
            if getattr(options, name) is not None:
                raise ValueError(f"unsupported: --{name.replace('_', '-')} with {other}. Omit one of them.")
    links = {"inner_gb_s": options.inner_gb_s, "outer_gb_s": options.outer_gb_s}
    profile = load_profile(options.profile or options.gpu, **links)
    # The one that needs no nodes first, which wins where two are equally fast.
    layouts = sorted(_PROPOSED, key=("striped", *LAYOUTS).index)
    return Request(
        model=model_of(options.model),
        load=load_of_recording(options.seq, options.index)
        if options.index
        else load_of_density(
            options.seq, options.density, max_vertical=options.max_vertical, max_slash=options.max_slash
        ),
        profile=profile,
        gpus=options.gpus,
        node_size=node,
        memory_gib=options.gpu_memory or profile.memory_gib,
        margin=options.margin,
        global_batch=options.global_batch or options.gpus,
        attention=TRANSFORMER_ENGINE if is_dense else MTRAINING,
        index_sharing="head" if is_dense or options.index_sharing is None else options.index_sharing,
        layouts=("zigzag",) if is_dense else [options.layout] if options.layout else layouts,
        schedules=("flat",) if is_dense else [options.schedule] if options.schedule else SCHEDULES,
        recompute=[options.recompute] if options.recompute else RECOMPUTE,
        offload=(False,) if options.no_offload else (False, True),
        fixed={name: size for name in _SIZES if (size := getattr(options, name)) is not None},
        notes=tuple(_notes(options)),
    )


def _notes(options: argparse.Namespace) -> Iterator[str]:
    multiple = 2 * MTrainingConfig().block_size * options.gpus
    if options.seq % multiple:
        yield f"{options.seq} tokens do not divide over all sizes; multiples of {multiple} do."
    if options.micro_batch_size > 1:
        yield f"--micro-batch-size {options.micro_batch_size} is planned as 1: larger ones are not predicted."
