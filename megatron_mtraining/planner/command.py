"""``python -m megatron_mtraining plan``: parallel sizes, schedule and memory savers for a model on given GPUs."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..arguments import CommandParser
from ..config import INDEX_SHARINGS, LAYOUTS, SCHEDULES, MTrainingConfig
from ..errors import invalid
from ..metrics.drawn import density_of_caps
from .attention_clock import Load, dense_load, load_of_density, load_of_recording
from .model import MOST, PRESETS, SIZES, ModelShape
from .model_source import model_of, run_flags
from .plan import MTRAINING, RECOMPUTE, TRANSFORMER_ENGINE
from .profile import PROFILES, load_profile
from .report import report_lines, write_plans
from .search import Request, search

_DESCRIPTION = """\
Proposes parallel sizes, layout, schedule, recomputation and optimizer offload for a training run, with predicted memory
and time, and the flags to paste. Nothing runs and no GPU is needed; docs/planner.md says how far to trust it.

  python -m megatron_mtraining plan --model qwen2.5-3b --seq 512K --gpus 32 --gpu a100 --gpu-memory 40GB --node 8"""

_MODEL_FLAGS = dict(zip(("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"), SIZES, strict=True))
_SIZES = ("tp", "cp", "pp", "dp")
_NEVER_PROPOSED = "contiguous"
"""The one layout that is not proposed: it is uneven for every causal attention."""

_MOST_GPUS = 4096
"""Most GPUs that are planned for: more would take the planner minutes."""

_MOST_TOKENS = 2**26
"""Most tokens in a sequence. Longer ones have never been trained on, and would take the planner minutes."""

_OF_SPARSE_ATTENTION = ("layout", "schedule", "index_sharing", "max_vertical")


def _wrong(rule: str, word: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {rule}, got {word:.40}.")


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of integers from ``least`` to ``most``."""

    def read(word: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", word) or not least <= int(word) <= most:
            raise _wrong(f"a whole number from {least} to {most}", word)
        return int(word)

    return read


def _number(least: float, most: float, rule: str, *, unit: str = "", factor: float = 1.0) -> Callable[[str], float]:
    """Return a reader of floats of a range; with a unit above ``least``; times ``factor`` if the word has the unit."""

    def read(word: str) -> float:
        match = re.fullmatch(rf"([0-9.e+-]+?)\s*({unit})?", word, re.IGNORECASE)
        try:
            value = float(match[1]) * (factor if match[2] else 1.0) if match else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most or (unit and value == least):
            raise _wrong(rule, word)
        return value

    return read


def _tokens(word: str) -> int:
    """Read ``131072``, ``512K`` or ``1M``."""
    match = re.fullmatch(r"([0-9]{1,18})([KM]?)", word.upper())
    count = int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]] if match else 0
    if not 1 <= count <= _MOST_TOKENS:
        raise _wrong(f"a number of tokens such as 131072, 512K or 1M, up to {_MOST_TOKENS >> 20}M", word)
    return count


def _sharing(word: str) -> str:
    if word not in INDEX_SHARINGS:
        raise _wrong(f"one of {', '.join(INDEX_SHARINGS)}", word)
    return word


_gib = _number(0, 1e6, "a size such as 40GB or 79.6GiB, above 0 and up to 1000000GB", unit="GIB|GB|G")
_share = _number(0, 1, "a share such as 5% or 0.05, above 0 and up to 100%", unit="%", factor=0.01)
_rate = _number(1e-3, 1e6, "a number from 0.001 to 1e+06")
_VERTICALS = _whole(0, 2**16)
_OF_RUN_FILE = {
    "global_batch": ("--global-batch-size", _whole(1, MOST)),
    "micro_batch": ("--micro-batch-size", _whole(1, MOST)),
    "index_sharing": ("--mtraining-index-sharing", _sharing),
    "max_vertical": ("--mtraining-max-vertical", _VERTICALS),
    "max_slash": ("--mtraining-max-slash", _whole(0, 2**20)),
}
"""Settings that a plan keeps of a launch config, with the reader of each."""


def main(argv: Sequence[str]) -> None:
    """Print plans; exit with status 2 and one sentence where a request is impossible."""
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
    except argparse.ArgumentError as error:
        is_ours = error.message.startswith("must be")
        _stop(parser, f"{error.argument_name} {error.message}" if is_ours else str(error))
    except (ValueError, OSError, RecursionError) as error:  # RecursionError: a file of nothing but brackets
        _stop(parser, str(error))


def _stop(parser: argparse.ArgumentParser, sentence: str) -> None:
    print(f"{parser.prog}: error: {sentence}", file=sys.stderr)
    sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mtraining plan", description=_DESCRIPTION, exit_on_error=False)
    add = parser.add_argument
    add("--model", help=f"{', '.join(PRESETS)}; a run file of Megatron's flags; a Hugging Face config.json")
    sizes = parser.add_argument_group("sizes of the model", "instead of --model, or winning over it")
    for name in _MODEL_FLAGS:
        sizes.add_argument(f"--{name.replace('_', '-')}", type=_whole(1, MOST), metavar="N")
    add("--seq", type=_tokens, required=True, help="tokens in a sequence: 524288, 512K or 1M")
    add("--gpus", type=_whole(1, _MOST_GPUS), required=True, help="GPUs of all nodes")
    add("--node", type=_whole(1, _MOST_GPUS), default=8, help="GPUs in a node (8)")
    add("--gpu", default="h200", choices=tuple(PROFILES), help="name of the GPU (h200)")
    add("--profile", metavar="FILE", help="JSON of a Profile's fields, instead of --gpu")
    add("--gpu-memory", type=_gib, metavar="SIZE", help="40GB or 40 (GiB, as GPUs are named); default: the GPU's")
    add("--inner-gb-s", type=_rate, help="overrides the profile: GB/s of a rank inside its node")
    add("--outer-gb-s", type=_rate, help="overrides the profile: GB/s of a rank between nodes")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--density", type=_share, help="share of causal pairs, 5%% or 0.05; 100%%: TransformerEngine's")
    load.add_argument("--index", type=Path, metavar="FILE", help="a recorded index (metrics.Recording)")
    add("--max-vertical", type=_VERTICALS, metavar="N", help="verticals of a head beside its sinks")
    add("--global-batch", type=_whole(1, MOST), help="sequences in a step; default: the launch config's, or one a GPU")
    for name in _SIZES:
        add(f"--{name}", type=_whole(1, _MOST_GPUS), metavar="N", help=f"fixes the {name} size")
    add("--layout", choices=LAYOUTS, help="fixes the layout")
    add("--schedule", choices=SCHEDULES, help="fixes the schedule")
    add("--index-sharing", choices=INDEX_SHARINGS, help=f"owner of an index ({INDEX_SHARINGS[0]})")
    add("--recompute", choices=RECOMPUTE, help="fixes what is computed anew")
    add("--no-offload", action="store_true", help="optimizer states stay on the GPU")
    margin = _number(0, 0.9, "a number from 0 to 0.9")
    add("--margin", type=margin, default=0.05, help="share of memory left for fragmentation (0.05)")
    add("--rows", type=_whole(1, MOST), default=8, help="plans in the table (8)")
    add("--json", type=Path, metavar="FILE", help="writes all plans")
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
    model, (settings, notes) = _model(options), _settings(options)
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
        fixed={name: size for name in _SIZES if (size := getattr(options, name)) is not None},
        notes=notes,
    )


def _model(options: argparse.Namespace) -> ModelShape:
    given = {size: getattr(options, name) for name, size in _MODEL_FLAGS.items()}
    missing = [f"--{name.replace('_', '-')}" for name, size in _MODEL_FLAGS.items() if given[size] is None]
    if options.model is None and missing:
        remedy = f"Or give all sizes: {', '.join(missing)} are missing."
        raise invalid("--model", f"one of {', '.join(PRESETS)}, or a file", "nothing", remedy)
    return model_of(options.model, given)


def _settings(options: argparse.Namespace) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return values of the command line, else of the launch config that is the model; and notes on those not kept."""
    flags = run_flags(options.model)
    settings = {name: getattr(options, name, None) for name in _OF_RUN_FILE}
    for name, (flag, reader) in _OF_RUN_FILE.items():
        if settings[name] is None and flag in flags:
            try:
                settings[name] = reader(" ".join(flags[flag]))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{flag} {error}") from None
    batch = settings["micro_batch"] or 1
    note = f"--micro-batch-size {batch} of {options.model} is planned as 1: larger ones are not predicted."
    return settings, (note,) if batch > 1 else ()


def _refuse_beside(other: str, names: Sequence[str], options: argparse.Namespace, remedy: str) -> None:
    """Refuse flags that would be ignored beside another one."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            raise invalid(f"--{name.replace('_', '-')}", f"left out beside {other}", value, remedy)


def _chosen(one: str | None, all_of_them: Sequence[str]) -> Sequence[str]:
    return all_of_them if one is None else (one,)


def _proposed_layouts() -> list[str]:
    """Return the proposed layouts, the package's default first, which wins where two are equally fast."""
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
