"""Rates of a GPU, its links and its host, which turn pairs, products and bytes into seconds; those known by name.

``docs/planner.md`` has which figures were measured, which fitted and which are assumed.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch

from ..console import read_json
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
    dense_forward_tflops: float  # of the fastest dense causal attention, which sparse times are compared with
    dense_backward_tflops: float
    gpu_forward_step_us: float  # of a ring step beside its pairs: kernels that start and end, the resumed softmax
    gpu_backward_step_us: float  # with its two passes and the sums of gradients
    host_forward_us: float  # to launch a forward of attention without its ring steps: selection, packs
    host_forward_step_us: float  # to launch one ring step, with its transfers
    host_backward_us: float
    host_backward_step_us: float
    inner_gb_s: float  # a rank's sends inside its node, 10**9 bytes a second in one direction
    outer_gb_s: float  # and between nodes
    inner_latency_us: float
    outer_latency_us: float
    memory_gib: float  # as the driver reports, 2**30 bytes
    gemm_tflops: float  # products of linear layers, over a whole training step
    memory_gb_s: float  # elementwise kernels' reads and writes, together
    selection_gpairs_s: float  # (query, key) scores of the probe rows
    host_gb_s: float  # between the GPU and its host's memory, in one direction
    host_adam_gparams_s: float  # parameters that a rank's share of the host's cores updates
    gpu: str  # the device's name, or a part of it
    ranks: int  # that were measured; 0 where the numbers come from several runs or a data sheet
    nodes: int  # that these ranks were on
    source: str  # origin of the numbers with date and command, and those of them that are assumed

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value, least = getattr(self, name), "from 0" if name.endswith("_us") else "above 0"
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and least == "above 0"):
                raise invalid(f"{name} of the profile", f"a number {least}", repr(value))


NUMBERS = tuple(field.name for field in fields(Profile) if field.type == "float")
"""Fields that are rates, times and sizes."""

PROFILES = {
    name: Profile(**entries)
    for name, entries in read_json("profiles", Path(__file__).with_name("profiles.json")).items()
}
"""Profiles by name. Costs of a ring step and of launches are of two H200s that emulated ranks of rings of 4 to 32
(docs/ablations.md): the host's fitted to the mean of both ranks, the GPU's those of a hierarchical ring of 32."""


def load_profile(name: str, **changes: float | None) -> Profile:
    """Return a profile of this package by name, or one from a JSON file of all its fields; ``changes`` replace fields.

    Raises:
        ValueError: neither, or a field that is missing or unknown.
    """
    profile = PROFILES.get(name)
    if profile is None:
        entries, wanted = read_json("profile", name), {field.name for field in fields(Profile)}
        if differing := sorted(wanted ^ set(entries)):
            remedy = f"Missing or unknown: {', '.join(differing)}. Known by name: {', '.join(PROFILES)}."
            raise invalid("profile", "a name, or a JSON file of all fields of Profile", name, remedy)
        profile = Profile(**entries)
    given = {field: value for field, value in changes.items() if value is not None}
    note = f" From the command line: {given}." if given else ""
    return replace(profile, **given, source=profile.source + note)


def device_name() -> str:
    """Return the name of this process's GPU, ``cpu`` without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@lru_cache(maxsize=8)
def profile_of_machine(name: str) -> tuple[str, Profile]:
    """Return a profile for this machine with its name; ``auto`` is the one of the GPU's name, else ``h200``.

    A profile of another GPU is used and warned of, once: it decides speed, not results.

    Raises:
        ValueError: see :func:`load_profile`.
    """
    device = device_name()
    if name == "auto":
        name = next((known for known, each in PROFILES.items() if each.gpu in device), "h200")
        return name, PROFILES[name]
    profile = load_profile(name)
    if profile.gpu not in device:
        logging.getLogger(__name__).warning(
            "The profile %s is of %s, and this machine has %s: layout and schedule may not be the fastest. "
            "mtraining profile measures this one.",
            *(name, profile.gpu, device),
        )
    return name, profile
