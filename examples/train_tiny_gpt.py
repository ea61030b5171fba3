"""Trains a small GPT on real text with vertical-slash sparse attention in a ring over context-parallel ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_tiny_gpt.py

Everything around attention is Megatron-Core's: GPTModel, DDP, optimizer, schedules. All ranks are one context-parallel
group, in inner rings of two. A dense warm-up on short sequences is followed by sparse attention on long ones. The run
ends with a comparison of sparse and dense attention on the same weights, and fails when it is not what it should be.
The same script runs on CPUs with gloo and on GPUs with NCCL; the CUDA kernels want bfloat16 and wider heads:

    torchrun --standalone --nproc-per-node 4 examples/train_tiny_gpt.py \
        --dtype bfloat16 --head-dim 64 --mtraining-backend cuda
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator

import tiny_gpt  # noqa: F401  (first: it sets what Megatron-Core's import may print)

# isort: split
import torch.distributed as dist

from megatron_mtraining import MTrainingConfig
from megatron_mtraining import megatron as mtraining
from tiny_gpt.data import Text, batch_of, load_text
from tiny_gpt.journal import Comparison, Journal, Observation
from tiny_gpt.model import build_trainee, check_backend, start_megatron, start_process_group
from tiny_gpt.observe import Attention, dump_queries_and_keys, observe_attention
from tiny_gpt.options import check_output, parse_options
from tiny_gpt.report import final_lines, observation_line, print_line, progress_bar, verdict
from tiny_gpt.steps import Stepper

HELD_OUT_SEED = 10**6
"""Where the seeds of held-out batches start; those of training batches count up from the run's own seed."""


def main() -> int:
    """Runs the whole job; the exit status is 1 when the final check fails."""
    options = parse_options()
    config = mtraining.config_from_args(options)
    check_output(options)
    text = load_text(options.data, longest_sequence=max(options.seq_len, options.warmup_seq_len))
    with distributed_job(options, config) as stepper:
        journal = Journal(dense_steps=min(config.dense_warmup_steps, options.steps))
        train(stepper, text, options, journal)
        # The comparison is of sparse attention, even after a run that ended inside its dense warm-up.
        mtraining.set_training_step(max(options.steps, config.dense_warmup_steps))
        journal.final, attention = compare(stepper, text, options)
        complaint = verdict(journal)
        if options.dump_qk:
            dump_queries_and_keys(attention, options.dump_qk)
        if dist.get_rank() == 0:
            # Only here: importing matplotlib takes a second that no other rank needs.
            from tiny_gpt.plots import draw_pictures

            journal.write(options.output_dir / "journal.json")
            pictures = draw_pictures(journal, attention, options.output_dir)
            print_line(final_lines(journal, pictures, complaint, config))
    return 1 if complaint else 0


@contextlib.contextmanager
def distributed_job(options: argparse.Namespace, config: MTrainingConfig) -> Iterator[Stepper]:
    """The process groups and the model for the length of a ``with`` block."""
    device = start_process_group(options.device)
    try:
        check_backend(options, config, device)
        inner_size = start_megatron(config, inner_size=options.inner_size, seed=options.seed)
        yield Stepper(build_trainee(options, device), config, inner_size)
    finally:
        dist.destroy_process_group()


def train(stepper: Stepper, text: Text, options: argparse.Namespace, journal: Journal) -> None:
    """All training steps, with a look at attention after every interval and at the end."""
    began, steps_timed = time.perf_counter(), 0
    for step in progress_bar(options.steps):
        mtraining.set_training_step(step)
        shape = batch_shape(options, is_dense=step < journal.dense_steps)
        journal.losses.append(stepper.train(batch_of(text.training, **shape, seed=options.seed + step)))
        steps_timed += 1
        if (step + 1) % options.report_interval and step + 1 < options.steps:
            continue
        step_ms = 1e3 * (time.perf_counter() - began) / steps_timed
        held_out = batch_of(text.held_out, batch_size=1, seq_len=shape["seq_len"], seed=HELD_OUT_SEED)
        summary = observe_attention(stepper, held_out).summary()
        journal.observations.append(Observation(step=step + 1, step_ms=step_ms, **summary))
        print_line(observation_line(journal))
        began, steps_timed = time.perf_counter(), 0


def batch_shape(options: argparse.Namespace, *, is_dense: bool) -> dict[str, int]:
    """Several short sequences while attention is dense, one long one after that."""
    if is_dense:
        return {"batch_size": options.warmup_batch_size, "seq_len": options.warmup_seq_len}
    return {"batch_size": 1, "seq_len": options.seq_len}


def compare(stepper: Stepper, text: Text, options: argparse.Namespace) -> tuple[Comparison, Attention]:
    """Sparse and dense loss of the same weights on the same held-out text, and the attention of its first sequence."""
    observed, dense_losses = [], []
    for number in range(options.validation_sequences):
        batch = batch_of(text.held_out, batch_size=1, seq_len=options.seq_len, seed=HELD_OUT_SEED + number)
        observed.append(observe_attention(stepper, batch))
        with mtraining.dense_evaluation():
            dense_losses.append(stepper.evaluate(batch))
    summaries = [attention.summary() for attention in observed]
    means = {name: sum(summary[name] for summary in summaries) / len(summaries) for name in summaries[0]}
    comparison = Comparison(
        sparse_loss=means["held_out_loss"],
        dense_loss=sum(dense_losses) / len(dense_losses),
        density=means["density"],
        recall=means["recall"],
    )
    return comparison, observed[0]


if __name__ == "__main__":
    sys.exit(main())
