"""Messages to the user: how to start, how a run ends, and wrong flags, each in one sentence a host.

Megatron's checks of flags are assertions, some without a message. The flags that one is about are read from its own
source line. This module imports Megatron only for an error: the launcher first puts the script's folder on the path.
"""

from __future__ import annotations

import argparse
import ast
import enum
import functools
import inspect
import linecache
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import FrameType
from typing import Any, NoReturn

from ..arguments import BACKEND, config_from_args, with_similar, with_similar_flag
from ..errors import InvalidError, invalid
from ..ranks import is_first_rank_of_host

PROGRAM = "mtraining"

_FIRST_RANK_REPORTS_WITHIN_S = 10.0
"""Seconds that the other ranks of its host wait before they end: torchrun then ends all, reported or not."""
_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
_SET_BY_TORCHRUN = ("MASTER_ADDR", "RANK", "WORLD_SIZE")

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


def end_with(error: object) -> NoReturn:
    """End the process with status 2 and one sentence for each host: what the user must change."""
    if not is_first_rank_of_host():  # which prints it and ends them, unless it alone has no error
        time.sleep(_FIRST_RANK_REPORTS_WITHIN_S)
    print(f"{PROGRAM}: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def print_how_to_start(argv: Sequence[str]) -> None:
    """Print, where nothing started this process as a rank, the command that would; a script may make its own group."""
    if chooses(argv[1:]) and not any(name in os.environ for name in _SET_BY_TORCHRUN):
        sentence = "this is no rank of a job. Unless the script makes a process group itself, start it with"
        print(f"{PROGRAM}: {sentence} {start_command(argv)}.", file=sys.stderr, flush=True)


def chooses(arguments: Sequence[str]) -> bool:
    """Return whether the flags of a script ask for this backend."""
    return _value_of("--attention-backend", arguments) == BACKEND


def start_command(argv: Sequence[str]) -> str:
    """Return the command that starts a script and its flags on ranks, as few as its parallel sizes ask for."""
    num_ranks = 1
    for flag in _SIZES:
        size = _value_of(flag, argv[1:]) or "1"
        num_ranks *= max(int(size), 1) if size.isdecimal() else 1
    return f"torchrun --nproc-per-node {num_ranks} -m megatron_mtraining {argv[0]} and its flags"


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    found = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else following
    return found


def print_errors_once(parser: argparse.ArgumentParser) -> None:
    """Have ``parser`` end with one sentence a host, instead of its usage for each rank or a traceback.

    Megatron reads enums by name, with a function whose KeyError argparse does not catch.
    """
    for action in parser._actions:
        if action.type is not None and not isinstance(action.type, type):
            action.type = _reader(action.type, action.choices)
    parser.error = lambda message: end_with(with_similar_flag(message, parser))


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
    from ..megatron.runtime import process

    if process().args is None and not chooses(sys.argv[1:]):
        return None
    frames = [(each.frame, each.lineno) for each in inspect.getinnerframes(error.__traceback__, context=0)]
    if isinstance(error, InvalidError):
        return None if any(frame.f_code.co_name in _STEPS for frame, _ in frames) else str(error)
    missing = _NOT_SET.search(str(error))
    if missing and _module(frames[-1][0]) == "torch.distributed.rendezvous":
        return str(
            invalid(missing[1], "set for ranks to find each other", "none", f"Start it with {start_command(sys.argv)}.")
        )
    first = next((index for index, (frame, _) in enumerate(frames) if _is_one(frame, _CHECKS)), None)
    if first is None:
        return _of_check(error, frames[-1:]) if _is_one(frames[-1][0], _STARTS) else None
    return _of_check(error, frames[first:])


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _is_one(frame: FrameType, functions: dict[str, tuple[str, ...]]) -> bool:
    return frame.f_code.co_qualname in functions.get(_module(frame), ())


def _of_check(error: Exception, frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return the sentence for ``error``, raised in a check of Megatron in ``frames``."""
    ours = _of_sizes(frames[0][0].f_locals.get("args"))
    if ours is not None:
        return ours
    frame, line = [each for each in frames if _module(each[0]).startswith("megatron.")][-1]
    condition = _condition(frame.f_code.co_filename, line)
    values = _flags(condition, frame.f_locals) if condition else {}
    detail = "" if isinstance(error, LookupError) else str(error)  # of a lookup, the key alone
    rule = detail or (f"{ast.unparse(condition)}" if condition else repr(error))
    where = f"{os.path.basename(frame.f_code.co_filename)}, line {line}"
    names = " and ".join(values) or "flags"
    got = f", got {' and '.join(map(str, values.values()))}" if values else ""
    return f"{names} must be what Megatron-LM checks in {where}: {' '.join(rule.split())}{got}."


def _of_sizes(args: Any) -> str | None:
    """Return the sentence of this package for sizes that Megatron rejects, with what to do."""
    from ..megatron.unsupported import SIZES, check_flags

    try:
        if getattr(args, "world_size", None) is not None:
            check_flags(SIZES, args, config_from_args(args))
    except ValueError as error:
        return str(error)
    except (AttributeError, TypeError, ArithmeticError):  # another form, for which Megatron has its own message
        pass
    return None


def _condition(path: str, line: int) -> ast.expr | None:
    """Return the condition that the statement in that line asks for; for ``raise`` that of the ``if`` around it."""
    tree = ast.parse("".join(linecache.getlines(path)))
    around = [node for node in _nodes(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno]
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
    from ..megatron.runtime import process

    found, flags = {}, process().flags
    for node in _nodes(condition):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = variables.get(node.value.id), node.attr
            flag, value = flags.get(name), getattr(owner, name, None)
        elif isinstance(node, ast.Name):
            flag, value = flags.get(node.id), variables.get(node.id)
        else:
            continue
        if flag is not None:
            found[flag] = value
    return found


def _nodes(node: ast.AST) -> list[ast.AST]:
    """Return ``node`` and all below it, level by level."""
    nodes = [node]
    for each in nodes:
        nodes.extend(ast.iter_child_nodes(each))
    return nodes
