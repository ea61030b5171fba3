"""The doctor run on the small training script, and what it found."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.jobs import LAUNCHER, MODEL, ON_CPU, SPARSE, SWITCHES
from tests.programs import ROOT, Ended, run_ranks

SCRIPT = Path(__file__).with_name("pretrain_examined.py")
DOCUMENTS = "0 50 51 140 192"
"""One of a single token; none a multiple of a block."""


@dataclass(frozen=True)
class Examination:
    """The JSON that the doctor printed."""

    ended: Ended
    found: dict[str, Any]

    @property
    def faults(self) -> set[str]:
        """The checks that found a fault."""
        return self._with_status("FAULT")

    @property
    def passed(self) -> set[str]:
        """The checks that passed."""
        return self._with_status("passed")

    def text_of(self, check: str) -> str:
        """The sentence of a check."""
        return next(finding["text"] for finding in self.found["findings"] if finding["check"] == check)

    def _with_status(self, status: str) -> set[str]:
        return {finding["check"] for finding in self.found["findings"] if finding["status"] == status}


def start(
    *flags: object, cp_size: int = 1, options: tuple[str, ...] = ("--json",), folder: Path, **variables: str
) -> Ended:
    """The doctor's end on the small script with ``flags`` beside its own and ``variables`` in the environment."""
    own = [word for name, value in MODEL.items() for word in (f"--{name}", value)]
    own += [*(f"--{name}" for name in SWITCHES), "--context-parallel-size", cp_size]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | variables
    command = (*ON_CPU, *LAUNCHER, "doctor", *options, SCRIPT, *own, *SPARSE, *flags)
    return run_ranks(cp_size, *command, folder=folder, environment=environment)


def examine(*flags: object, cp_size: int = 1, folder: Path, **variables: str) -> Examination:
    """An examination that came to its end."""
    ended = start(*flags, cp_size=cp_size, folder=folder, **variables)
    assert ended.stdout.count("\n") == 1, f"not one line on the standard output: {ended.stdout}{ended.stderr[-4000:]}"
    examination = Examination(ended, json.loads(ended.stdout))
    assert "error" not in examination.found, examination.found["error"]
    code = examination.found["exit_code"]
    # As torchrun does, the first rank that ends with a fault has the others ended, which may be at their own end.
    allowed = {code, -signal.SIGTERM} if code else {0}
    assert code in ended.statuses and set(ended.statuses) <= allowed, ended.statuses
    return examination
