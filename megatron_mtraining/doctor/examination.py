"""All checks of one model with its flags and data, in two or three runs of its script.

Two ways of computing the same step are compared by what rounding alone does to it.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..megatron.runtime import current_runtime, dense_attention
from ..transport.process_group import gather_numbers
from ..types import AttentionIndex, VerticalSlashIndex
from . import CannotStartError, checks
from .flags import Setting, shortest_length
from .observation import Observation, common_share, given_indices
from .report import LIMIT, Report, gather_lists, gather_objects, is_anywhere, quoted
from .training import Batch, Passes, Start, Step, Training

FEWER_RANKS, MEGATRONS = "fewer ranks", "Megatron's attention"
_MEMORY_SHARE = 0.7
"""Share of a GPU's free memory that a sequence on one rank may be predicted to take."""

_PERTURBATIONS = 2
_EPS = torch.finfo(torch.float32).eps


@dataclass(slots=True)
class _Own:
    """Results of the run with the user's own ranks that the other runs need, on this rank."""

    weights: dict[str, Tensor]
    batches: list[Batch | None]
    step: Step
    indices: dict[str, AttentionIndex]
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
    batches, weights = training.read_batches(), training.weights()
    with Observation(training, record_inputs=True) as observed:
        step = _first_step(training, batches)
    if not is_anywhere(observed.first):
        raise CannotStartError("The model must have causal self attention of GPTModel or HybridModel, got none.")
    report.setting.update(_setting(training, checks.mean_density(observed)))
    checks.check_documents(training, batches, observed, report)
    checks.check_attention_repeats(training, observed, report)
    checks.check_gradients_repeat(training, step, training.step(batches), report)
    checks.check_recomputation(training, observed, report)
    checks.check_selection(observed, report)
    checks.check_padding(training, batches, observed, report)
    own = _Own(
        weights=weights,
        batches=batches,
        step=step,
        indices={name: call.index for name, call in observed.first.items()},
        cp_size=training.args.context_parallel_size,
        packed_local=checks.is_packed(observed) and training.args.transformer_impl == "local",
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
    with Observation(training) as observed:
        training.step(own.batches, forward_only=True)
    shares = [
        common_share(own.indices[name], call.index, seq_len=call.layout.seq_len)
        for name, call in observed.first.items()
        if isinstance(call.index, VerticalSlashIndex)
    ]
    shares = gather_lists(shares)
    with given_indices(training, own.indices if shares else {}):
        expected = measure(training, own.batches)
    text = f"{own.cp_size} context-parallel ranks and 1, {training.args.seq_length} tokens, {report.density}"
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

    def compare_dense(training: Training) -> None:
        training.load(own.weights)
        step = training.step(own.batches)
        text = f"every key selected and Megatron's own, 1 context-parallel rank, {training.args.seq_length} tokens, "
        compare(MEGATRONS, step, own.every_key, report, text=text + "density 100.0%")

    try:
        passes.run(Setting(cp_size=1, seq_len=seq_len, megatrons_attention=True), compare_dense)
    except CannotStartError as error:
        report.add(MEGATRONS, str(error), passed=None)


def _setting(training: Training, density: float) -> dict[str, Any]:
    args, parameter = training.args, next(iter(training.parameters().values()))
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    return {
        "ranks": args.world_size,
        "tensor_pipeline_context": " x ".join(map(str, sizes)),
        "expert_parallel": getattr(args, "expert_model_parallel_size", 1),
        "layers": args.num_layers,
        "tokens": args.seq_length,
        "dense_below": args.mtraining_dense_below,
        "blocks_a_rank": args.seq_length // args.context_parallel_size // args.mtraining_block_size,
        "weights": f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device.type}",
        "layout_and_schedule": f"{current_runtime().config.layout}, {current_runtime().config.schedule}",
        "density": f"{density:.1%}",
    }


@dataclass(slots=True)
class Yardstick:
    """A step, and how far rounding moves it."""

    step: Step
    loss: float
    """The change of the loss that counts as rounding."""
    gradients: dict[str, float]
    """The change of each parameter's gradient, as a norm."""


def measure(training: Training, batches: list[Batch | None]) -> Yardstick:
    """Return a step and the largest changes when every weight is moved by one unit in its last place, twice at random.

    Less than float32's own rounding of sums is never measured: of a loss the float32 eps, of a gradient the same of its
    norm. Losses also have the rounding of their tokens' logits, which is independent and averages out.
    """
    step = training.step(batches)
    eps = max(torch.finfo(each.dtype).eps for each in training.parameters().values())
    tokens = training.args.seq_length * training.args.micro_batch_size
    floor = abs(step.loss) * max(2 * _EPS, eps / math.sqrt(tokens))
    rounding = Yardstick(step, floor, {name: float(each.norm()) * _EPS for name, each in step.gradients.items()})
    for seed in range(_PERTURBATIONS):
        with training.rounded_otherwise(seed):
            other = training.step(batches)
        rounding.loss = max(rounding.loss, abs(other.loss - step.loss))
        for name, known in rounding.gradients.items():
            rounding.gradients[name] = max(known, float((other.gradients[name] - step.gradients[name]).norm()))
    return rounding


def compare(check: str, step: Step, expected: Yardstick, report: Report, *, text: str) -> None:
    """Compare loss and gradients of ``step`` with the expected ones and add the findings. A collective over all ranks.

    Args:
        check: its name.
        step: the step under test.
        expected: the other one, with what rounding does.
        report: takes the table and the finding.
        text: what was compared and where.
    """
    own = {}
    for name, gradient in step.gradients.items():
        difference = float((gradient - expected.step.gradients[name]).norm())
        own[name] = 0.0 if difference == 0 else difference / max(expected.gradients[name], 1e-300)
    merged: dict[str, float] = {}
    for part in gather_objects(own):
        for name, multiple in part.items():
            merged[name] = max(merged.get(name, 0.0), multiple, key=_nan_last)
    loss = abs(step.loss - expected.step.loss) / expected.loss
    report.gradients[check] = {"loss": loss} | merged
    worst = max(merged, key=lambda name: _nan_last(merged[name]))
    within = all(multiple <= LIMIT for multiple in report.gradients[check].values())
    found = f"loss {step.loss:.6f} and {expected.step.loss:.6f}, {loss:.2g} times rounding; "
    found += f"worst gradient {merged[worst]:.2g} times, {worst}"
    report.add(check, f"{found}; {text}", passed=within)


def _nan_last(multiple: float) -> float:
    return math.inf if math.isnan(multiple) else multiple
