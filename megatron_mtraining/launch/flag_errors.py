"""Wrong flags of Megatron's, each in one sentence a host: what its parser cannot read, and what its checks raise.

The checks are assertions, some of them bare. Which flags one is about stands in its own source line.
"""

from __future__ import annotations

import argparse
import ast
import enum
import functools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ..arguments import config_from_args, with_similar, with_similar_flag
from ..errors import InvalidError, invalid
from ..megatron.flag_refusals import check_sizes
from .report import SETTINGS, chooses, end_with, start_command

_CHECKS = {
    "megatron.training.arguments": ("parse_args", "validate_args", "core_transformer_config_from_args"),
    "megatron.training.argument_utils": ("core_transformer_config_from_args",),
    "megatron.core.model_parallel_config": ("ModelParallelConfig.__post_init__",),
    "megatron.core.transformer.transformer_config": (
        "TransformerConfig.__post_init__",
        "MLATransformerConfig.__post_init__",
    ),
}
"""Functions of Megatron that check flags, by module: all that is raised below them is about flags."""

_STARTS = {
    "megatron.training.arguments": ("parse_and_validate_args",),
    "megatron.training.initialize": ("initialize_megatron",),
    "megatron.core.parallel_state": ("initialize_model_parallel", "create_hierarchical_groups"),
}
"""Functions that also start what may fail for other reasons: only what they raise themselves is about flags."""

_STEPS = ("train_step", "evaluate_and_print_results")
_NOT_SET = re.compile(r"environment variable (\w+) expected, but not set")


def say_errors_once(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Have ``parser`` end with one sentence a host, instead of its usage for each rank or a traceback.

    Megatron reads enums by name, with a function whose KeyError argparse hands through.
    """
    for action in parser._actions:
        if action.type is not None and not isinstance(action.type, type):
            action.type = _reader(action.type, action.choices)
    parser.error = lambda message: end_with(with_similar_flag(message, parser))
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
            raise argparse.ArgumentTypeError(with_similar(f"invalid choice: {text!r}{among}", text, names)) from error

    return checked


def sentence_of(error: Exception) -> str | None:
    """Return the sentence for what is wrong with the flags of a run with this backend; None for every other error."""
    if SETTINGS.args is None and not chooses(sys.argv[1:]):
        return None
    places = list(traceback.walk_tb(error.__traceback__))
    if isinstance(error, InvalidError):
        return None if any(frame.f_code.co_name in _STEPS for frame, _ in places) else str(error)
    missing = _NOT_SET.search(str(error))
    if missing and _module(places[-1][0]) == "torch.distributed.rendezvous":
        return str(
            invalid(missing[1], "set for ranks to find each other", "none", f"Start it with {start_command(sys.argv)}.")
        )
    first = next((index for index, (frame, _) in enumerate(places) if _is_one(frame, _CHECKS)), None)
    if first is None:
        return _of_check(error, places[-1:]) if _is_one(places[-1][0], _STARTS) else None
    return _of_check(error, places[first:])


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _is_one(frame: FrameType, functions: dict[str, tuple[str, ...]]) -> bool:
    return frame.f_code.co_qualname in functions.get(_module(frame), ())


def _of_check(error: Exception, places: Sequence[tuple[FrameType, int]]) -> str:
    """Return the sentence for ``error``, raised in a check of Megatron, whose frames and lines are ``places``."""
    ours = _of_sizes(places[0][0].f_locals.get("args"))
    if ours is not None:
        return ours
    frame, line = [place for place in places if _module(place[0]).startswith("megatron.")][-1]
    condition = _condition(frame.f_code.co_filename, line)
    values = _flags(condition, frame.f_locals) if condition else {}
    detail = "" if isinstance(error, LookupError) else str(error)  # of a lookup, the key alone
    rule = detail or (f"{ast.unparse(condition)}" if condition else repr(error))
    where = f"{os.path.basename(frame.f_code.co_filename)}, line {line}"
    names = " and ".join(values) or "flags"
    got = f", got {' and '.join(map(str, values.values()))}" if values else ""
    return f"{names} must be what Megatron-LM checks in {where}: {' '.join(rule.split())}{got}."


def _of_sizes(args: Any) -> str | None:
    """Return the sentence of this package for sizes that Megatron has refused, which says what to do."""
    try:
        if getattr(args, "world_size", None) is not None:
            check_sizes(args, config_from_args(args))
    except ValueError as error:
        return str(error)
    except (AttributeError, TypeError, ArithmeticError):  # another form, which Megatron's own words are for
        pass
    return None


def _condition(path: str, line: int) -> ast.expr | None:
    """Return the condition that the statement in that line asks for; for ``raise`` that of the ``if`` around it."""
    tree = ast.parse("".join(linecache.getlines(path)))
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno]
    around.sort(key=lambda node: node.end_lineno - node.lineno, reverse=True)
    if not around:
        return None
    if isinstance(around[-1], ast.Assert):
        return around[-1].test
    if isinstance(around[-1], ast.Raise):
        return next((node.test for node in reversed(around) if isinstance(node, ast.If)), None)
    return getattr(around[-1], "value", None) or getattr(around[-1], "test", None)


def _flags(condition: ast.expr, variables: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that ``condition`` reads, as they are typed, with their values."""
    found = {}
    for node in ast.walk(condition):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = variables.get(node.value.id), node.attr
            flag, value = SETTINGS.flags.get(name), getattr(owner, name, None)
        elif isinstance(node, ast.Name):
            flag, value = SETTINGS.flags.get(node.id), variables.get(node.id)
        else:
            continue
        if flag is not None:
            found[flag] = value
    return found
