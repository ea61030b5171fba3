"""Record what the real selection chooses on a trained layer, as a small file for ``tools.bench.run --index FILE``.

    torchrun --standalone --nproc-per-node 4 examples/train_tiny_gpt.py --dump-qk outputs/qk.pt
    python -m tools.bench.record outputs/qk.pt --output tools/bench/data/tiny_gpt.json

The sets are those of the length that the model read; nothing is scaled here
(megatron_mtraining/metrics/indices.py says what a run at another length does with them).
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch

from megatron_mtraining import select
from megatron_mtraining.arguments import CommandParser
from megatron_mtraining.config import INDEX_SHARINGS, MTrainingConfig
from megatron_mtraining.errors import invalid
from megatron_mtraining.metrics import AttentionCall, Recording, attention_recall, density, held_out_rows
from megatron_mtraining.recall.layers import load_layer
from megatron_mtraining.selection import ESTIMATORS

RECALL_ROWS = 128

SELECTION_FIELDS = (
    "estimator",
    "index_sharing",
    "num_probe_rows",
    "num_probe_windows",
    "sink_tokens",
    "local_blocks",
    "vertical_top_p",
    "slash_top_p",
    "max_vertical",
    "max_slash",
    "slash_run_length",
)
"""Fields of the configuration that a selection reads, beside the block size."""


def record(sample: AttentionCall, config: MTrainingConfig, *, origin: str) -> Recording:
    """Select on ``sample`` and keep the first batch row's runs, with what is to be known about them.

    Raises:
        ValueError: the sample is of packed documents.
    """
    if sample.cu_seqlens is not None:
        raise invalid("cu_seqlens", "absent from what is recorded", "packed documents", "Dump one long document.")
    seq_len = sample.query.shape[1]
    index = select(sample.query, sample.key, config, softmax_scale=sample.softmax_scale)
    rows = held_out_rows(config, seq_len=seq_len, count=RECALL_ROWS)
    recall = attention_recall(sample.query, sample.key, index, rows=rows, softmax_scale=sample.softmax_scale)[0].mean(
        -1
    )
    recall = recall.unflatten(0, (index.num_lists, -1)).mean(1)
    densities = density(index, seq_len=seq_len)
    return Recording.of(
        index,
        seq_len=seq_len,
        source={
            "origin": origin,
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "config": {name: getattr(config, name) for name in SELECTION_FIELDS},
            "density": [round(share, 4) for share in densities.tolist()],
            "recall": [round(share, 4) for share in recall.tolist()],
        },
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; a flag for each field of the configuration that selection reads, with its default."""
    parser = CommandParser(prog="python -m tools.bench.record", description=__doc__)
    default = MTrainingConfig.algorithm_1(num_probe_windows=8)
    parser.add_argument("dump", help="file of query and key, as the example's --dump-qk writes")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--origin", default="examples/train_tiny_gpt.py, last layer, one held-out sequence")
    for name in SELECTION_FIELDS:
        value = getattr(default, name)
        choices = {"estimator": ESTIMATORS.names, "index_sharing": INDEX_SHARINGS}.get(name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, choices=choices)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Write the file and print its contents."""
    arguments = parse_arguments(argv)
    try:
        given = {name: getattr(arguments, name) for name in SELECTION_FIELDS}
        config = MTrainingConfig.algorithm_1(dense_below=0, **given)
        recording = record(load_layer(arguments.dump, 1), config, origin=arguments.origin)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    recording.save(arguments.output)
    for number, (vertical, slash) in enumerate(zip(recording.vertical, recording.slash, strict=True)):
        columns, distances = (sum(length for _, length in runs) for runs in (vertical, slash))
        share, recall = (100 * recording.source[name][number] for name in ("density", "recall"))
        print(
            f"list {number}: {columns} columns in {len(vertical)} runs, {distances} distances in {len(slash)} runs, "
            f"density {share:.1f} %, recall {recall:.1f} %"
        )
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1024:.1f} KiB")


if __name__ == "__main__":
    main()
