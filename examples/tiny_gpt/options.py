"""The example's flags: its own, and one for each field of MTrainingConfig."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path

from megatron_mtraining import MTrainingConfig, SequenceLayout
from megatron_mtraining import megatron as mtraining
from megatron_mtraining.backends.cuda import BLOCK_SIZE, HEAD_DIMS
from megatron_mtraining.config import LAYOUTS, LOCAL_PATTERNS, SCHEDULES
from megatron_mtraining.errors import invalid
from megatron_mtraining.ranks import is_first_rank
from megatron_mtraining.selection import ESTIMATORS

SPARSE_DEFAULTS = {
    "layout": "striped",
    "schedule": "hierarchical",
    "dense_below": 0,
    "dense_warmup_steps": 140,
    "max_density": 0.24,
}
"""For a byte-level model of two layers, whose heads are diffuse: without the bound most of them become dense.

Layout and schedule are named, so that two runs on other machines show the same ring."""


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ``arguments`` replaces it in tests."""
    parser = argparse.ArgumentParser(description="Train a small GPT with sparse ring attention in Megatron-Core.")
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=200, help="training steps, the dense warm-up included")
    run.add_argument("--seq-len", type=int, default=4096, help="tokens in a sequence once attention is sparse")
    run.add_argument("--warmup-seq-len", type=int, default=1024, help="tokens in a sequence of the dense warm-up")
    run.add_argument("--warmup-batch-size", type=int, default=2, help="sequences in a step of the dense warm-up")
    run.add_argument("--data", type=Path, help="a text file or a folder; default: Python's own source files")
    run.add_argument("--output-dir", type=Path, default=Path("outputs/tiny_gpt"), help="where pictures are written")
    run.add_argument(
        "--dump-qk", type=Path, help="file for queries and keys of a held-out text, for mtraining recall --load"
    )
    run.add_argument("--report-interval", type=int, default=20, help="training steps between two printed lines")
    run.add_argument("--validation-sequences", type=int, default=4, help="held-out sequences of the final comparison")
    run.add_argument("--seed", type=int, default=1234, help="seed of weights and of the order of the text")
    run.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each rank has one"
    )
    run.add_argument("--inner-size", type=int, help="ranks in an inner ring; default: 2 where the ranks are even")

    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=2)
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--ffn-hidden-size", type=int, default=384)
    model.add_argument("--num-heads", type=int, default=4)
    model.add_argument("--num-kv-heads", type=int, default=2)
    model.add_argument("--head-dim", type=int, help="channels of a head; default: hidden_size over num_heads")
    model.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: with float32 master weights"
    )
    model.add_argument("--learning-rate", type=float, default=3e-3)

    mtraining.add_arguments(parser)
    parser.set_defaults(**{f"mtraining_{name}": value for name, value in SPARSE_DEFAULTS.items()})
    short = parser.add_argument_group("short forms of --mtraining-*")
    short.add_argument("--layout", choices=LAYOUTS, dest="mtraining_layout", default=argparse.SUPPRESS)
    short.add_argument("--schedule", choices=SCHEDULES, dest="mtraining_schedule", default=argparse.SUPPRESS)
    short.add_argument("--estimator", dest="mtraining_estimator", default=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        _check(options, cp_size=int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as error:
        parser.error(str(error))
    return options


_LEAST = (
    "steps",
    "seq_len",
    "warmup_seq_len",
    "warmup_batch_size",
    "report_interval",
    "validation_sequences",
    "num_kv_heads",
)
"""Options that must be at least 1."""


def _check(options: argparse.Namespace, *, cp_size: int) -> None:
    """Settles ``inner_size``, and refuses before the first step what could not be trained, or only after the warm-up.

    Raises:
        ValueError: one sentence that names the flag's value.
    """
    for name in _LEAST:
        if getattr(options, name) < 1:
            raise invalid(name, "at least 1", getattr(options, name))
    if options.inner_size is None:
        options.inner_size = 2 if cp_size % 2 == 0 else cp_size
    if options.inner_size < 1 or cp_size % options.inner_size:
        raise invalid("inner_size", f"a divisor of the {cp_size} ranks", options.inner_size)
    _check_heads(options)
    config = mtraining.config_from_args(options)
    if config.backend == "cuda":
        _check_kernels(options, config)
    if config.pattern in LOCAL_PATTERNS:
        rule = "vertical_slash or dense in this example, which counts and draws columns and distances"
        raise invalid("pattern", rule, config.pattern)
    ESTIMATORS.get(config.estimator)
    sizes = {"cp_size": cp_size, "block_size": config.block_size, "node_size": options.inner_size}
    for seq_len in (options.warmup_seq_len, options.seq_len):
        SequenceLayout(config.layout, seq_len=seq_len, **sizes)


def _check_heads(options: argparse.Namespace) -> None:
    """Settles ``head_dim``, and refuses heads that do not share keys evenly or that rotary embeddings cannot turn."""
    if options.num_heads % options.num_kv_heads:
        raise invalid("num_heads", f"a multiple of num_kv_heads {options.num_kv_heads}", options.num_heads)
    if options.head_dim is None:
        if options.hidden_size % options.num_heads:
            remedy = "Give --head-dim, or another number of heads."
            raise invalid("num_heads", f"a divisor of hidden_size {options.hidden_size}", options.num_heads, remedy)
        options.head_dim = options.hidden_size // options.num_heads
    if options.head_dim < 2 or options.head_dim % 2:
        raise invalid("head_dim", "even and at least 2", options.head_dim)


def check_output(options: argparse.Namespace) -> None:
    """Refuses before training what the first rank would meet after it: nowhere to write, nothing to draw with.

    Raises:
        SystemExit: one sentence that names the flag, or the package that is missing.
    """
    if not is_first_rank():
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("matplotlib must be installed for the pictures, got none. Run pip install '.[demo]'.")
    for flag, folder in (
        ("--output-dir", options.output_dir),
        ("--dump-qk", options.dump_qk and options.dump_qk.parent),
    ):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise SystemExit(f"{flag} must be where a file can be written, got {folder}: {error.strerror}.") from error


def _check_kernels(options: argparse.Namespace, config: MTrainingConfig) -> None:
    """What the CUDA kernels cannot compute, by the names of this script's flags."""
    needed = "with --mtraining-backend cuda"
    if options.dtype == "float32":
        raise invalid("dtype", f"bfloat16 {needed}", options.dtype, "Give --dtype bfloat16.")
    if options.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise invalid("head_dim", f"one of {known} {needed}", options.head_dim, f"Give --head-dim {HEAD_DIMS[0]}.")
    if config.block_size != BLOCK_SIZE:
        remedy = f"Give --mtraining-block-size {BLOCK_SIZE}."
        raise invalid("block_size", f"{BLOCK_SIZE} {needed}", config.block_size, remedy)
