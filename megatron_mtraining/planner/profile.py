"""Rates of a GPU, its links and its host, which turn pairs, products and bytes into seconds; those known by name.

``docs/planner.md`` has which figures were measured, which fitted and which are assumed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
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
    """Rate of the fastest dense causal attention, which sparse times are compared with."""

    dense_backward_tflops: float
    gpu_forward_step_us: float
    """Time that the GPU takes for a ring step beside its pairs: kernels that start and end, the resumed softmax."""

    gpu_backward_step_us: float
    """GPU time for a ring step of a backward, with its two passes and the sums of gradients."""

    host_forward_us: float
    """Time that a host takes to launch a forward of attention, but for its ring steps: selection, opening, packs."""

    host_forward_step_us: float
    """Host time to launch one ring step of a forward, with its transfers."""

    host_backward_us: float
    """Host time to launch a backward, but for its ring steps."""

    host_backward_step_us: float

    inner_gb_s: float
    """Rate at which a rank sends inside its node, 10**9 bytes a second in one direction."""

    outer_gb_s: float
    """Rate at which a rank sends between nodes, 10**9 bytes a second in one direction."""

    inner_latency_us: float
    outer_latency_us: float
    memory_gib: float
    """Memory that the driver gives out, in 2**30 bytes."""

    gemm_tflops: float
    """Rate of the products of linear layers, over a whole training step."""

    memory_gb_s: float
    """Rate at which elementwise kernels read and write, together, 10**9 bytes a second."""

    selection_gpairs_s: float
    """Rate of the selection's window, 10**9 (query, key) scores a second."""

    host_gb_s: float
    """Rate between the GPU and its host's memory, 10**9 bytes a second in one direction."""

    host_adam_gparams_s: float
    """Rate at which a rank's share of the host's cores updates parameters, 10**9 a second."""

    source: str
    """Origin of the numbers, and those of them that are assumed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), "from 0" if field.name.endswith("_us") else "above 0"
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            is_right = is_number and (value > 0 or (value == 0 and least == "from 0"))
            if field.name != "source" and not is_right:
                raise invalid(f"{field.name} of the profile", f"a number {least}", repr(value))

    def with_links(self, **gb_s: float | None) -> Profile:
        """Return the profile with ``inner_gb_s`` and ``outer_gb_s`` where they are not None; ``source`` names them."""
        given = {name: rate for name, rate in gb_s.items() if rate is not None}
        note = f"{self.source} Links as given on the command line: {given}." if given else self.source
        return replace(self, **given, source=note)


_BY_NAME = Path(__file__).with_name("profiles.json")
PROFILES = {name: Profile(**entries) for name, entries in json.loads(_BY_NAME.read_text()).items()}
"""Profiles by name. Costs of a ring step and of launches are of two H200s that played ranks of rings of 4 to 32
(docs/ablations.md): the host's fitted to the mean of both ranks, the GPU's those of a hierarchical ring of 32."""


def load_profile(name: str) -> Profile:
    """Return a profile of this package by name, or one from a JSON file of its fields.

    Raises:
        ValueError: neither.
    """
    if name in PROFILES:
        return PROFILES[name]
    try:
        entries = json.loads(Path(name).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        remedy = f"Known by name: {', '.join(PROFILES)}."
        raise invalid("profile", "a name or a readable JSON file", f"{name}: {error}", remedy) from None
    wanted = {field.name for field in fields(Profile)}
    rule = f"of fields {', '.join(sorted(wanted))}"
    if not isinstance(entries, dict):
        raise invalid("profile", rule, f"a {type(entries).__name__}")
    differing = (("Missing", wanted - set(entries)), ("Unknown", set(entries) - wanted))
    remedy = " ".join(f"{what}: {', '.join(sorted(names))}." for what, names in differing if names)
    if remedy:
        raise invalid("profile", rule, ", ".join(sorted(entries)), remedy)
    return Profile(**entries)
