"""Findings of an examination: rows of checks, tables, and the exit code that they add up to."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from ..transport.process_group import gather_numbers

PASSED, FAULT, NOT_CHECKED = "passed", "FAULT", "not checked"
LIMIT = 4.0
"""The multiple of rounding above which a difference is a fault.

Right runs reach 1.3; a softmax scale that is 1.5 times too large reaches 6 in bfloat16.
"""

_NAME_WIDTH = 28
_LONGEST_QUOTATION = 400
"""Characters of an error that are quoted; the traceback above has all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    status: str
    text: str


@dataclass(slots=True)
class Report:
    """Everything that is printed at the end; the same on every rank."""

    setting: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    gradients: dict[str, dict[str, float]] = field(default_factory=dict)
    """Gradient differences of each parameter as multiples of rounding, by check."""
    layers: list[dict[str, Any]] = field(default_factory=list)
    """Density, recall and worst head of each layer."""

    @property
    def density(self) -> str:
        """Mean density of the examined step, as the end of a finding."""
        return f"density {self.setting['density']}"

    def add(self, check: str, text: str, *, passed: bool | None) -> None:
        """Add the outcome of a check; ``passed`` is None where nothing could be checked."""
        status = {True: PASSED, False: FAULT, None: NOT_CHECKED}[passed]
        self.findings.append(Finding(check, status, text))

    @property
    def exit_code(self) -> int:
        """Exit code: 1 where a fault was found, else 0."""
        return int(any(finding.status == FAULT for finding in self.findings))

    def as_json(self) -> str:
        """Return one JSON object."""
        return json.dumps({"exit_code": self.exit_code} | _without_nan(asdict(self)))

    def as_text(self) -> str:
        """Return the same for people."""
        lines = ["mtraining doctor", ""]
        lines += [f"  {name.replace('_', ' '):<{_NAME_WIDTH}}{value}" for name, value in self.setting.items()]
        lines += [f"  note: {note}" for note in self.notes]
        for check, multiples in self.gradients.items():
            lines += ["", f"{check}: gradient differences as multiples of rounding (a fault above {LIMIT:g})"]
            for name, multiple in multiples.items():
                lines.append(f"  {multiple:>12.3g}  {name}{'  <- FAULT' if not multiple <= LIMIT else ''}")
        if self.layers:
            lines += ["", "selected keys (recall: share of dense attention, on rows that no estimator uses)"]
        for layer in self.layers:
            lines.append(
                f"  {layer['layer']:<40} density {layer['density']:8.4f}  recall {layer['recall']:7.4f}"
                f"  worst head {layer['worst_head']} with {layer['worst_recall']:.4f}"
            )
        lines += [""] + [f"{each.check:<{_NAME_WIDTH}}{each.status:<13}{each.text}" for each in self.findings]
        faults, unchecked = (sum(each.status == kind for each in self.findings) for kind in (FAULT, NOT_CHECKED))
        summary = f"{len(self.findings)} checks: {faults} faults, {unchecked} not checked. Exit code {self.exit_code}."
        return "\n".join([*lines, "", summary])


def quoted(error: Exception) -> str:
    """Return an error as part of a sentence: its type and its message, shortened."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {textwrap.shorten(text, _LONGEST_QUOTATION)}"


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks of the job, in rank order; JSON carries them. A collective over all ranks."""
    data = json.dumps(value).encode()
    longest = int(gather_numbers([len(data)]).max())
    table = gather_numbers([len(data), *data, *[0] * (longest - len(data))])
    return [json.loads(bytes(int(byte) for byte in row[1 : 1 + int(row[0])])) for row in table.tolist()]


def gather_lists(values: list[Any]) -> list[Any]:
    """Return the lists of all ranks as one. A collective over all ranks."""
    return sum(gather_objects(values), [])


def is_anywhere(condition: object) -> bool:
    """Return whether a condition is true on any rank. A collective over all ranks."""
    return any(gather_objects(bool(condition)))


def _without_nan(value: Any) -> Any:
    """Return the same with None, which is JSON, for what is no number."""
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
