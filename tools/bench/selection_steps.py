"""Times of the passes of a selection, each between CUDA events of its own, within a whole call."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch

from megatron_mtraining.commands.stopwatch import Stopwatch

from .clock import CallClock, Sample


def step_samples(call: Callable[[], object], *, device: torch.device, repeats: int) -> dict[str, list[Sample]]:
    """Time the launches of ``call``, a selection by the kernels, by the name of their pass.

    A pass that is launched several times in a call counts as their sum.
    """
    from megatron_mtraining.backends.cuda import _C

    marks, stopwatch = [], Stopwatch(device)

    def timed(launch: Callable[..., None]) -> Callable[..., None]:
        def run(step: _C.ProbePass, *arguments: object) -> None:
            start = stopwatch.mark()
            launch(step, *arguments)
            marks.append((step.name, start, stopwatch.mark()))

        return run

    launchers = {name: timed(getattr(_C, name)) for name in dir(_C) if name.endswith("probe_launch")}

    clock = CallClock(device, rest_ms=0.0)
    samples: dict[str, list[Sample]] = {}
    with patch.multiple(_C, **launchers):
        clock.sample(call)  # measures how long the host needs
        for _ in range(repeats):
            marks.clear()
            whole = clock.sample(call)
            times: dict[str, float] = {}
            for name, start, end in marks:
                times[name] = times.get(name, 0.0) + stopwatch.ms(start, end)
            for name, ms in times.items():
                samples.setdefault(name, []).append(Sample(ms, whole.sm_mhz))
    return samples
