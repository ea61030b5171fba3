"""Megatron's functions under a layout in a test without process groups, and the process of a test."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_mtraining.megatron import runtime, split
from megatron_mtraining.megatron.compat import Patches

PATCHES = Patches()
"""Replacements that :func:`follow` made; a test ends with ``PATCHES.undo()``."""


def follow(layout: str, block_size: int, node_size: int | None = None) -> None:
    """Have Megatron's functions follow a layout."""
    split.follow_layout(PATCHES, split.TokenSplit(layout, block_size, node_size))


def fresh_process(monkeypatch: pytest.MonkeyPatch, **state: Any) -> runtime.Process:
    """A process that remembers nothing but ``state``, until the test ends."""
    made = runtime.Process(**state)
    monkeypatch.setattr(runtime, "_process", made)
    return made
