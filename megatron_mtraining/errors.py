"""Errors and the one form in which a refusal is worded."""

from __future__ import annotations

from typing import Any

SUPPORTED_MEGATRON = "core 0.16, 0.17, 0.18, 0.19 and main of August 2026"
"""The Megatron-LM releases that this package is tested with, for the sentences that refuse another."""


class BackendUnavailableError(RuntimeError):
    """A backend that was asked for by name cannot run here; the message says what would make it run."""


class RankMismatchError(RuntimeError):
    """Ranks of one context-parallel group called with different plans; the message names the ranks."""


def invalid(name: str, rule: str, value: Any, remedy: str = "") -> ValueError:
    """Returns (never raises) the ValueError ``<name> must be <rule>, got <value>. <remedy>``."""
    sentence = f"{name} must be {rule}, got {value}."
    return ValueError(f"{sentence} {remedy}" if remedy else sentence)
