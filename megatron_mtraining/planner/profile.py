"""How fast a GPU and its links are, and how much it holds: what turns pairs, products and bytes into seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from ..errors import invalid


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Rates of one rank. TFLOP/s are useful ones: 4 (forward) or 10 (backward) x pairs x head_dim over time.

    Raises:
        ValueError: a rate that is not a positive number.
    """

    slash_forward_tflops: float
    vertical_forward_tflops: float
    slash_backward_tflops: float
    vertical_backward_tflops: float
    dense_forward_tflops: float
    """Of the fastest dense causal attention, which sparse times are compared with."""

    dense_backward_tflops: float
    gpu_forward_step_us: float
    """Time that the GPU takes for a ring step beside its pairs: kernels that start and end, the resumed softmax."""

    gpu_backward_step_us: float
    """The same of a backward, with its two passes and the sums of gradients."""

    host_forward_us: float
    """Time that a host takes to launch a forward of attention, but for its ring steps: selection, opening, packs."""

    host_forward_step_us: float
    """The same for one ring step with its transfers."""

    host_backward_us: float
    """Of a backward, but for its ring steps."""

    host_backward_step_us: float

    inner_gb_s: float
    """10**9 bytes a second that a rank sends inside its node, in one direction."""

    outer_gb_s: float
    """The same between nodes."""

    inner_latency_us: float
    outer_latency_us: float
    memory_gib: float
    """2**30 bytes that the driver gives out."""

    gemm_tflops: float
    """Of the products of linear layers, over a whole training step."""

    memory_gb_s: float
    """10**9 bytes a second that elementwise kernels read and write, together."""

    selection_gpairs_s: float
    """10**9 (query, key) scores a second of the selection's window."""

    host_gb_s: float
    """10**9 bytes a second between the GPU and its host's memory, in one direction."""

    host_adam_gparams_s: float
    """10**9 parameters a second that a rank's share of the host's cores updates."""

    source: str
    """Where the numbers come from, and which of them are assumed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "source":
                _check_number(
                    f"{field.name} of the profile", getattr(self, field.name), may_be_0=field.name.endswith("_us")
                )

    def with_links(self, **gb_s: float | None) -> Profile:
        """The same with those of ``inner_gb_s`` and ``outer_gb_s`` that are not None; ``source`` says so."""
        given = {name: rate for name, rate in gb_s.items() if rate is not None}
        note = f"{self.source} Links as given on the command line: {given}." if given else self.source
        return replace(self, **given, source=note)


def _check_number(name: str, value: object, *, may_be_0: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not may_be_0):
        raise invalid(name, "a number from 0" if may_be_0 else "a number above 0", repr(value))
