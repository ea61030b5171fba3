"""Values that Megatron's parser cannot read: one sentence a host, with the choices that come close."""

from __future__ import annotations

import argparse
import difflib
import enum
import functools
from collections.abc import Callable
from typing import Any, NoReturn

from .report import end_with


def say_errors_once(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Have ``parser`` end with one sentence a host, instead of its usage for each rank or a traceback.

    Megatron reads enums by name, with a function whose KeyError argparse hands through.
    """
    for action in parser._actions:
        if action.type is not None and not isinstance(action.type, type):
            action.type = _reader(action.type, action.choices)
    parser.error = functools.partial(_end, parser)
    return parser


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the longest name of each flag, by the name of its value in the arguments."""
    return {action.dest: max(action.option_strings, key=len) for action in parser._actions if action.option_strings}


def _reader(read: Callable[[str], Any], choices: Any) -> Callable[[str], Any]:
    names = [choice.name if isinstance(choice, enum.Enum) else str(choice) for choice in choices or ()]

    @functools.wraps(read)
    def checked(text: str) -> Any:
        try:
            return read(text)
        except (LookupError, AttributeError, AssertionError) as error:
            among = f" (choose from {', '.join(names)})" if names else ""
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r}{among}{_hint(text, names)}") from error

    return checked


def _end(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrecognized") else []
    mistyped = next((word.split("=")[0] for word in words if word.startswith("--")), None)
    end_with(message + (_hint(mistyped, list(parser._option_string_actions)) if mistyped else ""))


def _hint(text: str, names: list[str]) -> str:
    close = difflib.get_close_matches(text, names)
    return f". Did you mean {' or '.join(close)}?" if close else ""
