"""GPUs by name. ``docs/planner.md`` says which figures were measured, which fitted and which are assumed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

from ..errors import invalid
from .profile import Profile

_STEPS = {
    "gpu_forward_step_us": 145,
    "gpu_backward_step_us": 280,
    "host_forward_us": 2800,
    "host_forward_step_us": 250,
    "host_backward_us": 1600,
    "host_backward_step_us": 450,
}
"""Of two H200s that played ranks of rings of 4 to 32 (docs/ablations.md): the host's fitted to the mean of both ranks,
the GPU's those of a hierarchical ring of 32. Assumed to be those of other hosts and GPUs."""

_H200 = Profile(
    slash_forward_tflops=551,
    vertical_forward_tflops=551,
    slash_backward_tflops=441,
    vertical_backward_tflops=441,
    dense_forward_tflops=559,
    dense_backward_tflops=536,
    **_STEPS,
    inner_gb_s=300,
    outer_gb_s=25,
    inner_latency_us=10,
    outer_latency_us=20,
    memory_gib=140,
    gemm_tflops=575,
    memory_gb_s=3600,
    selection_gpairs_s=253,
    host_gb_s=50,
    host_adam_gparams_s=0.3,
    source="TFLOP/s of attention: docs/benchmarks/attention-clustered-131072_h200_2026-11-30.json at 04e3f78, whole "
    "calls, 131072 tokens, 16/2 heads, head_dim 128, slashes and verticals together. Selection: docs/benchmarks/"
    "selection-last_window-131072_h200_2026-11-30.json. gemm_tflops: one number fitted to both runs of "
    "docs/benchmarks/pretrain_gpt/131072_524288_2xh200_2026-11-30.json, 131072 tokens. Memory: as the driver reports. "
    "memory_gb_s: three quarters of the data sheet's. Ring steps and launches: docs/ablations.md, ranks of up to 32 "
    "played on two GPUs. Links, latencies and what the host computes are assumed.",
)

_OF_HOPPER = "The H200's but for what the data sheet gives for memory: no run of this package on an H100 is known."
_OF_AMPERE = (
    "Assumed: the data sheet's memory, links and peak of 312 TFLOP/s, of which products reach 0.7, dense attention "
    "about 0.6, and the mma.sync kernels what they reach of an H200's sustained rate. No run on an A100 is known."
)

PROFILES = {
    "h200": _H200,
    "h100": replace(_H200, memory_gib=79, memory_gb_s=2500, source=_OF_HOPPER),
    "a100": Profile(
        slash_forward_tflops=140,
        vertical_forward_tflops=140,
        slash_backward_tflops=100,
        vertical_backward_tflops=100,
        dense_forward_tflops=190,
        dense_backward_tflops=160,
        **_STEPS,
        inner_gb_s=200,
        outer_gb_s=25,
        inner_latency_us=10,
        outer_latency_us=20,
        memory_gib=79,
        gemm_tflops=220,
        memory_gb_s=1500,
        selection_gpairs_s=80,
        host_gb_s=25,
        host_adam_gparams_s=0.3,
        source=_OF_AMPERE,
    ),
}
"""Profiles by name."""


def load_profile(name: str) -> Profile:
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
    wanted = {field.name for field in fields(Profile)}
    if not isinstance(entries, dict) or set(entries) != wanted:
        rule = f"of fields {', '.join(sorted(wanted))}"
        if not isinstance(entries, dict):
            raise invalid("profile", rule, f"a {type(entries).__name__}")
        lacking, unknown = (", ".join(sorted(names)) for names in (wanted - set(entries), set(entries) - wanted))
        remedy = " ".join(f"{what}: {names}." for what, names in (("Missing", lacking), ("Unknown", unknown)) if names)
        raise invalid("profile", rule, ", ".join(sorted(entries)), remedy)
    return Profile(**entries)
