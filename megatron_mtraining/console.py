"""Numbers and files that commands read, folders that they write to, and tables that they print."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .errors import invalid

_NUMERIC = re.compile(r"[+-]?[0-9.,]*(e[+-]?[0-9]+)?%?|-|nan|inf")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of integers from ``least`` to ``most``."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise _wrong(f"a whole number from {least} to {most}", text)
        return int(text)

    return read


def number(least: float, most: float, rule: str = "", *, unit: str = "", factor: float = 1.0) -> Callable[[str], float]:
    """Return a reader of floats from ``least`` to ``most``.

    Args:
        least: smallest value; with a unit, values are above it.
        most: largest value.
        rule: text of the error. Default: the range.
        unit: regular expression of what may follow the number.
        factor: multiplies a number that the unit follows.
    """

    def read(text: str) -> float:
        match = re.fullmatch(rf"([0-9.e+-]+?)\s*({unit})?", text, re.IGNORECASE)
        try:
            value = float(match[1]) * (factor if match[2] else 1.0) if match else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most or (unit and value == least):
            raise _wrong(rule or f"a number from {least:g} to {most:g}", text)
        return value

    return read


def num_tokens(most: int) -> Callable[[str], int]:
    """Return a reader of ``131072``, ``512K`` or ``1M``, up to ``most``."""

    def read(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,18})([KM]?)", text.upper())
        count = int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]] if match else 0
        if not 1 <= count <= most:
            raise _wrong(f"a number of tokens such as 131072, 512K or 1M, up to {most >> 20}M", text)
        return count

    return read


def list_of(read: Callable[[str], object], known: Sequence[str] = ()) -> Callable[[str], list]:
    """Return a reader of comma-separated values, none twice; ``known``: the only ones, if there are any."""

    def read_all(text: str) -> list:
        for each in text.split(","):
            if known and each not in known:
                raise _wrong(f"some of {', '.join(known)}", each)
        return list(dict.fromkeys(read(each) for each in text.split(",")))

    return read_all


def read_json(name: str, path: str | Path, remedy: str = "") -> dict[str, Any]:
    """Return the mapping in a JSON file, which an error calls ``name``.

    Raises:
        ValueError: another file.
    """
    try:
        entries = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: a file of nothing but brackets
        raise invalid(name, "a readable JSON file", f"{path}: {error}", remedy) from None
    if not isinstance(entries, dict):
        raise invalid(name, "a JSON file with a mapping", f"{path} with {type(entries).__name__}", remedy)
    return entries


def check_folder(flag: str, folder: Path) -> None:
    """Make ``folder`` where it is not there, and write into it.

    Raises:
        ValueError: naming ``flag``, where that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise invalid(flag, "a folder that can be written", f"{folder}: {error.strerror}") from None


def check_file(flag: str, path: Path) -> None:
    """Make the folder of ``path`` where it is not there, and write into it.

    Raises:
        ValueError: naming ``flag``, where that cannot be done or ``path`` is a folder itself.
    """
    if path.is_dir():
        raise invalid(flag, "a file", f"the folder {path}")
    check_folder(flag, path.parent)


def print_lines(lines: Iterable[str]) -> None:
    """Print ``lines`` as they come; the end of a reader such as ``head`` is not an error."""
    try:
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "", markdown: bool = False
) -> list[str]:
    """Return the lines of a table; columns of numbers are aligned right.

    Args:
        headings: of the columns.
        rows: cells of each; missing ones at the end are empty.
        indent: text before each line.
        markdown: whether to draw the lines of a Markdown table.
    """
    columns = list(zip_longest(*rows, fillvalue="")) or [()] * len(headings)
    aligned = []
    for heading, cells in zip(headings, columns, strict=True):
        is_numeric = bool(cells) and all(_NUMERIC.fullmatch(cell) for cell in cells)
        width = max(map(len, (heading, *cells)))
        aligned.append([cell.rjust(width) if is_numeric else cell.ljust(width) for cell in (heading, *cells)])
    lines = list(zip(*aligned, strict=True))
    if not markdown:
        return [(indent + "  ".join(cells)).rstrip() for cells in lines]
    head, *body = [f"{indent}| {' | '.join(cells)} |" for cells in lines]
    return [head, indent + "".join(f"|{'-' * (len(cells[0]) + 2)}" for cells in aligned) + "|", *body]


def _wrong(rule: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {rule}, got {text:.40}.")
