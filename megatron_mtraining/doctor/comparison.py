"""Two ways of computing the same step, compared by what rounding alone does to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .report import LIMIT, Report, gather_objects
from .training import Batch, Step, Training

_PERTURBATIONS = 2
_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
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
    yardstick = Yardstick(step, floor, {name: float(each.norm()) * _EPS for name, each in step.gradients.items()})
    for seed in range(_PERTURBATIONS):
        with training.rounded_otherwise(seed):
            yardstick = _lengthened(yardstick, training.step(batches))
    return yardstick


def compare(check: str, step: Step, expected: Yardstick, report: Report, *, text: str, also: bool = True) -> None:
    """Compare loss and gradients of ``step`` with the expected ones and add the findings. A collective over all ranks.

    Args:
        check: its name.
        step: the step under test.
        expected: the other one, with what rounding does.
        report: takes the table and the finding.
        text: what was compared and where.
        also: a further condition for passing.
    """
    own = {name: _multiple(step, expected, name) for name in step.gradients}
    merged: dict[str, float] = {}
    for part in gather_objects(own):
        for name, multiple in part.items():
            merged[name] = _larger(merged.get(name, 0.0), multiple)
    loss = abs(step.loss - expected.step.loss) / expected.loss
    report.gradients[check] = {"loss": loss} | merged
    worst = max(merged, key=lambda name: math.inf if math.isnan(merged[name]) else merged[name])
    within = all(multiple <= LIMIT for multiple in report.gradients[check].values())
    found = f"loss {step.loss:.6f} and {expected.step.loss:.6f}, {loss:.2g} times rounding; "
    found += f"worst gradient {merged[worst]:.2g} times, {worst}"
    report.add(check, f"{found}; {text}", passed=within and also)


def _lengthened(yardstick: Yardstick, other: Step) -> Yardstick:
    """Return the yardstick that takes the differences to another step for rounding too."""
    step, gradients = yardstick.step, {}
    for name, known in yardstick.gradients.items():
        gradients[name] = max(known, float((other.gradients[name] - step.gradients[name]).norm()))
    return Yardstick(step, max(yardstick.loss, abs(other.loss - step.loss)), gradients)


def _multiple(step: Step, expected: Yardstick, name: str) -> float:
    difference = float((step.gradients[name] - expected.step.gradients[name]).norm())
    return 0.0 if difference == 0 else difference / max(expected.gradients[name], 1e-300)


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
