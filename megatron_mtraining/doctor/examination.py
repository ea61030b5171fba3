"""All checks of one model with its flags and data, in two or three runs of its script."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..megatron.runtime import current_runtime
from ..transport.process_group import gather_numbers
from ..types import AttentionIndex, VerticalSlashIndex
from .comparison import Yardstick, compare, measure
from .document_check import check_documents
from .errors import CannotStartError, quoted
from .flags import Setting, shortest_length
from .observation import Observation, common_share, dense_attention, given_indices
from .padding_check import check_padding
from .passes import Passes, Start
from .repeat_checks import check_attention_repeats, check_gradients_repeat, check_recomputation
from .report import Report, gather_objects
from .selection import check_selection, in_percent, mean_density
from .training import Batch, Step, Training

FEWER_RANKS, MEGATRONS = "fewer ranks", "Megatron's attention"
_MEMORY_SHARE = 0.7
"""Share of a GPU's free memory that a sequence on one rank may be predicted to take."""


@dataclass(slots=True)
class _Own:
    """Results of the run with the user's own ranks that the other runs need, on this rank."""

    weights: dict[str, Tensor]
    batches: list[Batch | None]
    step: Step
    indices: dict[str, AttentionIndex]
    density: str
    cp_size: int
    packed_local: bool
    every_key: Yardstick | None = None


def examine(start: Start) -> Report:
    """Run every check that these flags allow. Every rank of the job calls it.

    Raises:
        CannotStartError: nothing could be checked; the message has the remedy.
    """
    report, passes = Report(), Passes(start)
    seq_len = _longest_on_one_rank(passes, report)
    own = passes.run(Setting(seq_len=seq_len), lambda training: _on_own_ranks(training, report))
    report.notes[:0] = passes.notes
    if own.cp_size == 1:
        report.add(FEWER_RANKS, "there is one context-parallel rank already", passed=None)
    else:
        setting = Setting(cp_size=1, seq_len=seq_len)
        own.every_key = passes.run(setting, lambda training: _on_one_rank(training, own, report))
    _against_megatron(passes, own, seq_len, report)
    return report


def _longest_on_one_rank(passes: Passes, report: Report) -> int | None:
    """Return the tokens that fit one context-parallel rank, by what a short sequence takes there; None for all."""
    args = passes.read_flags()
    if args.context_parallel_size == 1 or args.distributed_backend != "nccl":
        return None
    least = shortest_length(args)
    fits = passes.run(Setting(cp_size=1, seq_len=least), lambda training: _tokens_that_fit(training, least))
    if fits >= args.seq_length:
        return None
    seq_len = max(least, fits // least * least)
    report.notes.append(f"{seq_len} of {args.seq_length} tokens: the longest sequence predicted to fit one rank")
    return seq_len


def _tokens_that_fit(training: Training, seq_len: int) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step(training.read_batches())
    taken = max(1, torch.cuda.max_memory_allocated() - before)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(gather_numbers([free * _MEMORY_SHARE * seq_len / taken]).min())


def _on_own_ranks(training: Training, report: Report) -> _Own:
    batches = training.read_batches()
    weights = training.weights()
    observed = Observation(training, record_inputs=True)
    with observed:
        step = _first_step(training, batches)
    if not any(gather_objects(bool(observed.first))):
        raise CannotStartError("The model must have causal self attention of GPTModel or HybridModel, got none.")
    density = in_percent(mean_density(observed))
    report.setting.update(_setting(training, density))
    check_documents(training, batches, observed, report, density)
    check_attention_repeats(training, observed, report, density)
    check_gradients_repeat(training, step, training.step(batches), report, density)
    check_recomputation(training, observed, report, density)
    check_selection(observed, report, density)
    check_padding(training, batches, observed, report)
    packed = any(gather_objects(any(call.cu_seqlens is not None for call in observed.first.values())))
    own = _Own(
        weights=weights,
        batches=batches,
        step=step,
        indices={name: call.index for name, call in observed.first.items()},
        density=density,
        cp_size=training.args.context_parallel_size,
        packed_local=packed and training.args.transformer_impl == "local",
    )
    if own.cp_size == 1:
        own.every_key = _measure_dense(training, own)
    return own


def _first_step(training: Training, batches: list[Batch | None]) -> Step:
    try:
        return training.step(batches)
    except Exception as error:
        traceback.print_exc()
        raise CannotStartError(f"A training step must run with these flags, got {quoted(error)}") from error


def _on_one_rank(training: Training, own: _Own, report: Report) -> Yardstick:
    training.load(own.weights)
    observed = Observation(training)
    with observed:
        training.step(own.batches, forward_only=True)
    shares = [
        common_share(own.indices[name], call.index, seq_len=call.layout.seq_len)
        for name, call in observed.first.items()
        if isinstance(call.index, VerticalSlashIndex)
    ]
    shares = sum(gather_objects(shares), [])
    with given_indices(training, own.indices if shares else {}):
        expected = measure(training, own.batches)
    text = f"{own.cp_size} context-parallel ranks and 1, {training.args.seq_length} tokens, {own.density}"
    text += f", the same keys ({min(shares):.1%} of each other's own)" if shares else ", each its own keys"
    compare(FEWER_RANKS, own.step, expected, report, text=text)
    return _measure_dense(training, own)


def _measure_dense(training: Training, own: _Own) -> Yardstick:
    with dense_attention():
        return measure(training, own.batches)


def _against_megatron(passes: Passes, own: _Own, seq_len: int | None, report: Report) -> None:
    if own.packed_local:
        reason = "Megatron's local attention does not support packed documents; TransformerEngine's does"
        report.add(MEGATRONS, reason, passed=None)
        return

    def look(training: Training) -> None:
        training.load(own.weights)
        step = training.step(own.batches)
        text = f"every key selected and Megatron's own, 1 context-parallel rank, {training.args.seq_length} tokens, "
        compare(MEGATRONS, step, own.every_key, report, text=text + "density 100.0%")

    try:
        passes.run(Setting(cp_size=1, seq_len=seq_len, megatrons_attention=True), look)
    except CannotStartError as error:
        report.add(MEGATRONS, str(error), passed=None)


def _setting(training: Training, density: str) -> dict[str, Any]:
    args, parameter = training.args, next(iter(training.parameters().values()))
    return {
        "ranks": args.world_size,
        "tensor_pipeline_context": (
            f"{args.tensor_model_parallel_size} x {args.pipeline_model_parallel_size} x {args.context_parallel_size}"
        ),
        "expert_parallel": getattr(args, "expert_model_parallel_size", 1),
        "layers": args.num_layers,
        "tokens": args.seq_length,
        "dense_below": args.mtraining_dense_below,
        "blocks_a_rank": args.seq_length // args.context_parallel_size // args.mtraining_block_size,
        "weights": f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device.type}",
        "layout_and_schedule": f"{current_runtime().config.layout}, {current_runtime().config.schedule}",
        "density": density.removeprefix("density "),
    }
