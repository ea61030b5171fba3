"""Errors and the one form in which a refusal is worded."""

from __future__ import annotations

import operator
from typing import Any

SUPPORTED_MEGATRON = "core 0.16, 0.17, 0.18, 0.19 and main of August 2026"
"""The Megatron-LM releases that this package is tested with, for the sentences that refuse another."""


class InvalidError(ValueError):
    """A value that the user must change; the message is one sentence or two, and needs no traceback."""


class BackendUnavailableError(RuntimeError):
    """A backend that was asked for by name cannot run here; the message says what would make it run."""


class RankMismatchError(RuntimeError):
    """Ranks of one context-parallel group called with different plans; the message names the ranks."""


def invalid(name: str, rule: str, value: Any, remedy: str = "") -> InvalidError:
    """Return (never raise) the InvalidError ``<name> must be <rule>, got <value>. <remedy>``."""
    sentence = f"{name} must be {rule}, got {value}."
    return InvalidError(f"{sentence} {remedy}" if remedy else sentence)


def check_type(name: str, given: object, kind: Any, rule: str, remedy: str = "") -> None:
    """Raise where ``given`` is not a ``kind``.

    Raises:
        ValueError: it is not; the sentence calls it ``name``.
    """
    if not isinstance(given, kind):
        raise invalid(name, rule, None if given is None else type(given).__name__, remedy)


def as_integer(name: str, value: Any, *, least: int, rule: str = "", remedy: str = "") -> int:
    """Return the int that ``value`` is: Python's or numpy's. A bool or a float is none, whatever its value.

    Raises:
        ValueError: it is no integer, or below ``least``.
    """
    try:
        number = None if isinstance(value, bool) else value if isinstance(value, int) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise invalid(name, rule or f"an integer of at least {least}", repr(value), remedy)
    return number
