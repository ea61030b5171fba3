"""``python -m megatron_mtraining plan``: parallel sizes, schedule and memory savers for a model on given GPUs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import INDEX_SHARINGS, LAYOUTS, SCHEDULES, MTrainingConfig
from ..errors import invalid
from .attention_clock import Load, load_of_density, load_of_recording
from .model_source import model_of
from .plan import MTRAINING, RECOMPUTE, TRANSFORMER_ENGINE
from .plan_report import report_lines, write_plans
from .presets import PRESETS
from .profile import Profile
from .profiles import PROFILES
from .search import Request, search

_DESCRIPTION = """\
Proposes parallel sizes, layout, schedule, recomputation and optimizer offload for a training run, with predicted memory
and time, and the flags to paste. Nothing runs and no GPU is needed; docs/planner.md says how far to trust it.

  python -m megatron_mtraining plan --model qwen2.5-3b --seq 512K --gpus 32 --gpu-memory 40GB --node 8"""

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

_UNITS = {"": 1, "K": 1024, "M": 1024**2}


def main(argv: Sequence[str]) -> None:
    """Prints plans; exits with status 2 and one sentence where a request is impossible."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        request = _request(options)
        candidates = search(request)
        print("\n".join(report_lines(request, candidates, rows=options.rows)))
        if options.json:
            write_plans(options.json, request, candidates)
    except (ValueError, OSError) as error:
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
    sizes = parser.add_argument_group("sizes of the model", "in the place of --model, or winning over it")
    for flag, field in _MODEL_SIZES.items():
        sizes.add_argument(flag, dest=field, type=int, metavar="N")
    parser.add_argument("--seq", required=True, help="tokens in a sequence: 524288, 512K or 1M")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of all nodes")
    parser.add_argument("--node", type=int, default=8, help="GPUs in a node (8)")
    parser.add_argument("--gpu", default="h200", choices=tuple(PROFILES), help="which GPU (h200)")
    parser.add_argument("--profile", metavar="FILE", help="JSON of a Profile's fields, in the place of --gpu")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="40GB or 40 (GiB, as GPUs are named); default: the GPU's")
    parser.add_argument("--inner-gb-s", type=float, help="overrides the profile: GB/s of a rank inside its node")
    parser.add_argument("--outer-gb-s", type=float, help="overrides the profile: GB/s of a rank between nodes")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--density", help="kept share of causal pairs, 5%% or 0.05; 100%%: dense, TransformerEngine's")
    load.add_argument("--index", type=Path, metavar="FILE", help="a recorded index (telemetry.Recording)")
    parser.add_argument("--max-vertical", type=int, metavar="N", help="verticals of a head beside its sinks")
    parser.add_argument("--global-batch", type=int, help="sequences in a step; default: one for each GPU")
    for name in ("tp", "cp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"fixes the {name} size")
    parser.add_argument("--layout", choices=LAYOUTS, help="fixes the layout")
    parser.add_argument("--schedule", choices=SCHEDULES, help="fixes the schedule")
    parser.add_argument("--index-sharing", choices=INDEX_SHARINGS, default=INDEX_SHARINGS[0], help="who has an index")
    parser.add_argument("--recompute", choices=RECOMPUTE, help="fixes what is computed anew")
    parser.add_argument("--no-offload", action="store_true", help="optimizer states stay on the GPU")
    parser.add_argument("--margin", type=float, default=0.05, help="share of memory left for fragmentation (0.05)")
    parser.add_argument("--rows", type=int, default=8, help="plans in the table (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all plans")
    return parser


def _request(options: argparse.Namespace) -> Request:
    for name in ("gpus", "node"):
        if getattr(options, name) < 1:
            raise invalid(f"--{name}", "at least 1", getattr(options, name))
    node = min(options.node, options.gpus)
    if options.gpus % node:
        raise invalid("--gpus", f"a multiple of the {node} GPUs of a node", options.gpus, "Give --node.")
    if not 0 <= options.margin < 1:
        raise invalid("--margin", "in [0, 1)", options.margin)
    profile = _profile(options)
    kept = None if options.density is None else _share(options.density)
    is_dense = kept == 1
    return Request(
        model=model_of(options.model, {field: getattr(options, field) for field in _MODEL_SIZES.values()}),
        load=_load(options, None if is_dense else kept),
        profile=profile,
        gpus=options.gpus,
        node_size=node,
        memory_gib=_gib(options.gpu_memory) if options.gpu_memory else profile.memory_gib,
        margin=options.margin,
        global_batch=options.gpus if options.global_batch is None else options.global_batch,
        attention=TRANSFORMER_ENGINE if is_dense else MTRAINING,
        index_sharing=options.index_sharing,
        layouts=("zigzag",) if is_dense else _chosen(options.layout, _proposed_layouts()),
        schedules=("flat",) if is_dense else _chosen(options.schedule, SCHEDULES),
        recompute=_chosen(options.recompute, RECOMPUTE),
        offload=(False,) if options.no_offload else (False, True),
        fixed={name: size for name in ("tp", "cp", "pp", "dp") if (size := getattr(options, name)) is not None},
    )


def _chosen(one: str | None, all_of_them: Sequence[str]) -> Sequence[str]:
    return all_of_them if one is None else (one,)


def _proposed_layouts() -> list[str]:
    """The package's default first, which wins where two are equally fast."""
    layouts = (layout for layout in LAYOUTS if layout != _NEVER_PROPOSED)
    return sorted(layouts, key=lambda layout: layout != MTrainingConfig().layout)


def _profile(options: argparse.Namespace) -> Profile:
    profile = Profile.load(options.profile or options.gpu)
    return profile.with_links(inner_gb_s=options.inner_gb_s, outer_gb_s=options.outer_gb_s)


def _load(options: argparse.Namespace, kept: float | None) -> Load:
    seq_len = _tokens(options.seq)
    if options.index is not None:
        return load_of_recording(seq_len, options.index)
    return load_of_density(seq_len, kept, max_vertical=options.max_vertical)


def _tokens(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if not match or not int(match[1]):
        raise invalid("--seq", "a number of tokens such as 131072, 512K or 1M", repr(text))
    return int(match[1]) * _UNITS[match[2]]


def _gib(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:G|GB|GIB)?", text.upper())
    if not match or not float(match[1]):
        raise invalid("--gpu-memory", "a size such as 40GB or 79.6GiB", repr(text))
    return float(match[1])


def _share(text: str) -> float:
    try:
        share = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise invalid("--density", "a share such as 5% or 0.05, above 0 and up to 100%", repr(text))
    return share
