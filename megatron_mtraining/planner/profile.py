"""How fast a GPU and its links are: what turns pairs and bytes into seconds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

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
    launch_us: float
    """Time of a ring step beside its pairs: launches, the resumed softmax."""

    inner_gb_s: float
    """10**9 bytes a second that a rank sends inside its node, in one direction."""

    outer_gb_s: float
    """The same between nodes."""

    inner_latency_us: float
    outer_latency_us: float
    source: str
    """Where the numbers come from, and which of them are assumed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "source":
                _check_number(
                    f"{field.name} of the profile", getattr(self, field.name), may_be_0=field.name.endswith("_us")
                )

    @classmethod
    def load(cls, name: str) -> Profile:
        """A profile of this package by name, or one from a JSON file of its fields.

        Raises:
            ValueError: neither.
        """
        if name in PROFILES:
            return PROFILES[name]
        remedy = f"Known by name: {', '.join(PROFILES)}."
        try:
            entries = json.loads(Path(name).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise invalid("profile", "a name or a readable JSON file", f"{name}: {error}", remedy) from None
        wanted = {field.name for field in fields(cls)}
        if not isinstance(entries, dict) or set(entries) != wanted:
            got = ", ".join(sorted(entries)) if isinstance(entries, dict) else f"a {type(entries).__name__}"
            raise invalid("profile", f"of fields {', '.join(sorted(wanted))}", got)
        return cls(**entries)


def _check_number(name: str, value: object, *, may_be_0: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not may_be_0):
        raise invalid(name, "a number from 0" if may_be_0 else "a number above 0", repr(value))


PROFILES = {
    "h200": Profile(
        slash_forward_tflops=515,
        vertical_forward_tflops=515,
        slash_backward_tflops=437,
        vertical_backward_tflops=437,
        dense_forward_tflops=562,
        dense_backward_tflops=540,
        launch_us=10,
        inner_gb_s=300,
        outer_gb_s=25,
        inner_latency_us=10,
        outer_latency_us=20,
        source="TFLOP/s: docs/benchmarks/attention-clustered-131072_h200_2026-11-30.json, whole calls, 131072 tokens, "
        "16/2 heads, head_dim 128, slashes and verticals together. Links, latencies and launch_us are assumed.",
    ),
}
"""Profiles by name."""
