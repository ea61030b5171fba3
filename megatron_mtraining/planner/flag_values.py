"""What the words of a command line mean: numbers in a range, tokens, shares and sizes of memory."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from ..errors import invalid

Reader = Callable[[str, str], Any]
"""Gives the value of a flag's word, from the flag and the word; raises a ValueError that names the flag."""

MOST_TOKENS = 2**26
"""In a sequence. Longer ones have never been trained on, and would take the planner minutes."""

_UNITS = {"": 1, "K": 1024, "M": 1024**2}
_SHOWN = 40
"""Characters of a wrong word that are told."""


class Read(argparse.Action):
    """Stores what ``reader`` makes of a word. Its sentence is told as it is, which argparse's ``type`` would not."""

    def __init__(self, *, reader: Reader, **options: Any) -> None:
        super().__init__(**options)
        self._reader = reader

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """See :class:`argparse.Action`."""
        setattr(namespace, self.dest, self._reader(option_string, values))


def whole(least: int, most: int) -> Reader:
    """Reads integers of a range."""

    def read(flag: str, word: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", word) or not least <= int(word) <= most:
            raise invalid(flag, f"a whole number from {least} to {most}", f"{word:.{_SHOWN}}")
        return int(word)

    return read


def number(least: float, most: float) -> Reader:
    """Reads floats of a range."""

    def read(flag: str, word: str) -> float:
        value = _float(word)
        if value is None or not least <= value <= most:
            raise invalid(flag, f"a number from {least:g} to {most:g}", f"{word:.{_SHOWN}}")
        return value

    return read


def tokens(flag: str, word: str) -> int:
    """``131072``, ``512K`` or ``1M``."""
    match = re.fullmatch(r"([0-9]{1,18})([KM]?)", word.upper())
    count = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= count <= MOST_TOKENS:
        rule = f"a number of tokens such as 131072, 512K or 1M, up to {MOST_TOKENS // _UNITS['M']}M"
        raise invalid(flag, rule, repr(word[:_SHOWN]))
    return count


def gib(flag: str, word: str) -> float:
    """``40GB``, ``79.6GiB`` or ``40``, as GPUs are named: 2**30 bytes each."""
    match = re.fullmatch(r"([0-9.]+)\s*(?:G|GB|GIB)?", word.upper())
    size = _float(match[1]) if match else None
    if size is None or not 0 < size <= 1e6:
        raise invalid(flag, "a size such as 40GB or 79.6GiB, above 0 and up to 1000000GB", repr(word[:_SHOWN]))
    return size


def share(flag: str, word: str) -> float:
    """``5%`` or ``0.05``."""
    value = _float(word.removesuffix("%"))
    if value is not None and word.endswith("%"):
        value /= 100
    if value is None or not 0 < value <= 1:
        raise invalid(flag, "a share such as 5% or 0.05, above 0 and up to 100%", repr(word[:_SHOWN]))
    return value


def _float(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
