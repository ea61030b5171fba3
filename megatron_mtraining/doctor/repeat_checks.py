"""Repeat checks: attention's bits, all gradients' bits, and the index that recomputation finds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .observation import Observation, is_same
from .report import Report, gather_objects
from .training import Step, Training

ATTENTION, PARAMETERS, RECOMPUTATION = "attention twice", "all gradients twice", "recomputation"
_SEED = 1234


def check_attention_repeats(training: Training, observed: Observation, report: Report, density: str) -> None:
    """Call every attention layer twice on its recorded inputs and compare outputs and gradients bit for bit."""
    different = []
    for name, module in training.attentions.items():
        runs = [_run_alone(module, *observed.inputs[name]) for _ in range(2)]
        if not all(_same_bits(one, other) for one, other in zip(*runs, strict=True)):
            different.append(name)
    different = sorted(set(sum(gather_objects(different), [])))
    text = f"outputs and gradients differ in {', '.join(different)}" if different else "the same bits in every layer"
    report.add(ATTENTION, f"{text}, {density}", passed=not different)


def check_gradients_repeat(training: Training, one: Step, other: Step, report: Report, density: str) -> None:
    """Compare all parameters' gradients of two steps bit for bit; they must be the same under --deterministic-mode."""
    different = [name for name, gradient in one.gradients.items() if not _same_bits(gradient, other.gradients[name])]
    table = gather_objects([different, len(one.gradients)])
    names, total = sorted(set(sum((row[0] for row in table), []))), max(row[1] for row in table)
    text = f"{len(names)} parameters of up to {total} on a rank differ" + (f", {names[0]} first" if names else "")
    if getattr(training.args, "deterministic_mode", False):
        report.add(PARAMETERS, f"{text}, {density}", passed=not names)
    else:
        report.add(PARAMETERS, f"{text}, {density}; only --deterministic-mode promises that none do", passed=None)


def check_recomputation(training: Training, observed: Observation, report: Report, density: str) -> None:
    """Compare the indices of all calls of a layer in a step, whose micro-batches are all the same.

    Where the flags recompute no attention, each layer is called once more without and once with gradients.
    """
    calls = max((len(indices) for indices in observed.indices.values()), default=0)
    recomputed = calls > training.args.pipeline_model_parallel_size
    indices = observed.indices if recomputed else _called_again(training, observed)
    different = [name for name, each in indices.items() if not all(is_same(each[0], other) for other in each[1:])]
    different = sorted(set(sum(gather_objects(different), [])))
    how = f"{calls} calls of a layer in a step" if recomputed else "these flags recompute no attention; called by hand"
    text = f"other keys in {', '.join(different)}" if different else "the same index"
    report.add(RECOMPUTATION, f"{text}; {how}, {density}", passed=not different)


def _called_again(training: Training, observed: Observation) -> dict[str, list[Any]]:
    again = Observation(training)
    with again:
        for name, module in training.attentions.items():
            args, kwargs = observed.inputs[name]
            for with_gradients in (False, True):
                with torch.set_grad_enabled(with_gradients):
                    module(*args, **kwargs)
    return again.indices


def _run_alone(module: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return output and gradients of query, key and value for a fixed gradient of the output."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in args[:3]]
    out = module(*inputs, *args[3:], **kwargs)
    generator = torch.Generator(out.device).manual_seed(_SEED)
    grad = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
