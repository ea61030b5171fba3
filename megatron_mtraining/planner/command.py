"""``python -m megatron_mtraining plan``: parallel sizes, schedule and memory savers for a model on given GPUs."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import INDEX_SHARINGS, LAYOUTS, SCHEDULES, MTrainingConfig
from ..errors import invalid
from .attention_clock import Load, dense_load, load_of_density, load_of_recording
from .caps import density_of_caps
from .flag_values import Read, Reader, gib, number, share, tokens, whole
from .model_shape import ModelShape
from .model_source import model_of, run_flags
from .plan import MTRAINING, RECOMPUTE, TRANSFORMER_ENGINE
from .plan_report import report_lines, write_plans
from .presets import PRESETS
from .profiles import PROFILES, load_profile
from .search import Request, search

_DESCRIPTION = """\
Proposes parallel sizes, layout, schedule, recomputation and optimizer offload for a training run, with predicted memory
and time, and the flags to paste. Nothing runs and no GPU is needed; docs/planner.md says how far to trust it.

  python -m megatron_mtraining plan --model qwen2.5-3b --seq 512K --gpus 32 --gpu a100 --gpu-memory 40GB --node 8"""

_MODEL_SIZES = {
    "--layers": "num_layers",
    "--hidden": "hidden_size",
    "--ffn": "ffn_hidden_size",
    "--heads": "num_heads",
    "--kv-heads": "num_kv_heads",
    "--head-dim": "head_dim",
    "--vocab": "vocab_size",
}
_NEVER_PROPOSED = "contiguous"
"""The one layout that is not proposed: it is uneven for every causal attention."""

_MOST_GPUS = 4096
"""More would take the planner minutes."""

_MOST = 2**30
"""Of sizes that only have to be no nonsense."""

_OF_SPARSE_ATTENTION = ("layout", "schedule", "index_sharing", "max_vertical")


_OF_RUN_FILE = {
    "global_batch": ("--global-batch-size", whole(1, _MOST)),
    "micro_batch": ("--micro-batch-size", whole(1, _MOST)),
    "index_sharing": ("--mtraining-index-sharing", lambda flag, word: _index_sharing(flag, word)),
    "max_vertical": ("--mtraining-max-vertical", whole(0, 2**16)),
    "max_slash": ("--mtraining-max-slash", whole(0, 2**20)),
}
"""What a plan keeps of a launch config: the reader of its words."""


def main(argv: Sequence[str]) -> None:
    """Prints plans; exits with status 2 and one sentence where a request is impossible."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
        request = _request(options)
        candidates = search(request)
        print("\n".join(report_lines(request, candidates, rows=options.rows)))
        if options.json:
            write_plans(options.json, request, candidates)
        sys.stdout.flush()  # here, where a reader that has gone is met
    except BrokenPipeError:  # `plan ... | head`: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, RecursionError) as error:  # RecursionError: a file of nothing but brackets
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mtraining plan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", help=f"{', '.join(PRESETS)}; a run file of Megatron's flags; a Hugging Face config.json"
    )

    def add(flag: str, reader: Reader, to: argparse._ActionsContainer = parser, **options: Any) -> None:
        to.add_argument(flag, action=Read, reader=reader, **options)

    sizes = parser.add_argument_group("sizes of the model", "in the place of --model, or winning over it")
    for flag, field in _MODEL_SIZES.items():
        add(flag, whole(1, _MOST), sizes, dest=field, metavar="N")
    add("--seq", tokens, required=True, help="tokens in a sequence: 524288, 512K or 1M")
    add("--gpus", whole(1, _MOST_GPUS), required=True, help="GPUs of all nodes")
    add("--node", whole(1, _MOST_GPUS), default=8, help="GPUs in a node (8)")
    parser.add_argument("--gpu", default="h200", choices=tuple(PROFILES), help="which GPU (h200)")
    parser.add_argument("--profile", metavar="FILE", help="JSON of a Profile's fields, in the place of --gpu")
    add("--gpu-memory", gib, metavar="SIZE", help="40GB or 40 (GiB, as GPUs are named); default: the GPU's")
    for name, where in (("inner", "inside its node"), ("outer", "between nodes")):
        add(f"--{name}-gb-s", number(1e-3, 1e6), help=f"overrides the profile: GB/s of a rank {where}")
    load = parser.add_mutually_exclusive_group()
    add("--density", share, load, help="kept share of causal pairs, 5%% or 0.05; 100%%: dense, TransformerEngine's")
    load.add_argument("--index", type=Path, metavar="FILE", help="a recorded index (telemetry.Recording)")
    add("--max-vertical", whole(0, 2**16), metavar="N", help="verticals of a head beside its sinks")
    add(
        "--global-batch", whole(1, _MOST), help="sequences in a step; default: the launch config's, or one for each GPU"
    )
    for name in ("tp", "cp", "pp", "dp"):
        add(f"--{name}", whole(1, _MOST_GPUS), metavar="N", help=f"fixes the {name} size")
    parser.add_argument("--layout", choices=LAYOUTS, help="fixes the layout")
    parser.add_argument("--schedule", choices=SCHEDULES, help="fixes the schedule")
    parser.add_argument("--index-sharing", choices=INDEX_SHARINGS, help=f"who has an index ({INDEX_SHARINGS[0]})")
    parser.add_argument("--recompute", choices=RECOMPUTE, help="fixes what is computed anew")
    parser.add_argument("--no-offload", action="store_true", help="optimizer states stay on the GPU")
    add("--margin", number(0, 0.9), default=0.05, help="share of memory left for fragmentation (0.05)")
    add("--rows", whole(1, _MOST), default=8, help="plans in the table (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all plans")
    return parser


def _request(options: argparse.Namespace) -> Request:
    node = min(options.node, options.gpus)
    if options.gpus % node:
        raise invalid("--gpus", f"a multiple of the {node} GPUs of a node", options.gpus, "Give --node.")
    is_dense = options.density == 1
    if is_dense:
        _refuse_beside("--density 100%", _OF_SPARSE_ATTENTION, options, "Dense attention is TransformerEngine's.")
    if options.index is not None:
        _refuse_beside("--index", ("max_vertical",), options, "A recorded index has verticals of its own.")
    model, settings = _model(options), _settings(options)
    profile = load_profile(options.profile or options.gpu)
    profile = profile.with_links(inner_gb_s=options.inner_gb_s, outer_gb_s=options.outer_gb_s)
    return Request(
        model=model,
        load=_load(options, settings),
        profile=profile,
        gpus=options.gpus,
        node_size=node,
        memory_gib=options.gpu_memory or profile.memory_gib,
        margin=options.margin,
        global_batch=settings["global_batch"] or options.gpus,
        attention=TRANSFORMER_ENGINE if is_dense else MTRAINING,
        index_sharing=INDEX_SHARINGS[0] if is_dense else settings["index_sharing"] or INDEX_SHARINGS[0],
        layouts=("zigzag",) if is_dense else _chosen(options.layout, _proposed_layouts()),
        schedules=("flat",) if is_dense else _chosen(options.schedule, SCHEDULES),
        recompute=_chosen(options.recompute, RECOMPUTE),
        offload=(False,) if options.no_offload else (False, True),
        fixed={name: size for name in ("tp", "cp", "pp", "dp") if (size := getattr(options, name)) is not None},
        notes=settings["notes"],
    )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a launch config given as the model says of the run beside its shape, where the command line says nothing."""
    flags = run_flags(options.model)
    settings = {name: getattr(options, name, None) for name in _OF_RUN_FILE}
    for name, (flag, reader) in _OF_RUN_FILE.items():
        if settings[name] is None and flag in flags:
            settings[name] = reader(flag, " ".join(flags[flag]))
    micro_batch = settings.pop("micro_batch") or 1
    batch = f"--micro-batch-size {micro_batch} of {options.model} is planned as 1: larger ones are not predicted."
    return {**settings, "notes": (batch,) if micro_batch > 1 else ()}


def _index_sharing(flag: str, word: str) -> str:
    if word not in INDEX_SHARINGS:
        raise invalid(flag, f"one of {', '.join(INDEX_SHARINGS)}", repr(word))
    return word


def _model(options: argparse.Namespace) -> ModelShape:
    missing = [flag for flag, field in _MODEL_SIZES.items() if getattr(options, field) is None]
    if options.model is None and missing:
        remedy = f"Or give all sizes: {', '.join(missing)} are missing."
        raise invalid("--model", f"one of {', '.join(PRESETS)}, or a file", "nothing", remedy)
    return model_of(options.model, {field: getattr(options, field) for field in _MODEL_SIZES.values()})


def _refuse_beside(other: str, names: Sequence[str], options: argparse.Namespace, remedy: str) -> None:
    """Refuses flags that would be ignored beside another one."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            raise invalid(f"--{name.replace('_', '-')}", f"left out beside {other}", value, remedy)


def _chosen(one: str | None, all_of_them: Sequence[str]) -> Sequence[str]:
    return all_of_them if one is None else (one,)


def _proposed_layouts() -> list[str]:
    """The package's default first, which wins where two are equally fast."""
    layouts = (layout for layout in LAYOUTS if layout != _NEVER_PROPOSED)
    return sorted(layouts, key=lambda layout: layout != MTrainingConfig().layout)


def _load(options: argparse.Namespace, settings: dict[str, Any]) -> Load:
    seq_len, kept = options.seq, options.density
    if options.index is not None:
        return load_of_recording(seq_len, options.index)
    if kept == 1:
        return dense_load(seq_len)
    most = MTrainingConfig().max_vertical if settings["max_vertical"] is None else settings["max_vertical"]
    if kept is not None:
        least = density_of_caps(seq_len, max_vertical=most, max_slash=0)
        if kept < least:
            rule = (
                f"at least {math.ceil(1e4 * least) / 100:g}%, what {most} verticals beside sinks and local blocks keep "
                f"of {seq_len} tokens"
            )
            raise invalid("--density", rule, f"{100 * kept:g}%", "Lower --max-vertical, or keep more.")
    return load_of_density(seq_len, kept, max_vertical=most, max_slash=settings["max_slash"])
