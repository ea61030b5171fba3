"""The command line: ``torchrun ... -m megatron_mtraining [--config run.yaml] script.py [flags of the script]``.

``python -m megatron_mtraining COMMAND ...``, with a command of ``COMMANDS``, does something else than start a run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..arguments import CommandParser, add_arguments, with_similar
from ..doctor import CannotStartError
from ..errors import SUPPORTED_MEGATRON, invalid
from ..launch_config import LaunchConfig, check_script, read_launch_config
from .messages import PROGRAM, end_with, print_errors_once, print_how_to_start, sentence_of


class Command(NamedTuple):
    """A subcommand of ``mtraining``."""

    module: str
    """Module whose ``main`` takes the arguments after the command's name; imported when the command runs."""

    help: str
    """Line of the help: an imperative without a full stop."""


COMMANDS = {
    "plan": Command("planner.command", "plan such a run: parallel sizes, memory, time, flags"),
    "profile": Command(
        "commands.profile.command", "measure this machine: the profile that plan, balance and auto read"
    ),
    "trace": Command("commands.trace", "read a profiler's trace: kernels by kind, exposed communication, gaps"),
    "balance": Command("commands.balance.command", "count work and traffic of each rank for an index"),
    "doctor": Command(
        "doctor.command", "examine this machine, or check that a model with its flags and data is computed right"
    ),
    "recall": Command("recall.command", "measure recall against density of every selection on your model and text"),
    "evaluate": Command(
        "evaluate.command", "evaluate models under dense and sparse inference: needles, copies, perplexity"
    ),
}
"""Subcommands by name; each ends the process itself where its arguments are wrong."""

_DESCRIPTION = """\
Runs an unchanged Megatron-LM training script, which then accepts --attention-backend mtraining:

  torchrun --nproc-per-node 8 -m megatron_mtraining pretrain_gpt.py \\
      --attention-backend mtraining --context-parallel-size 8 --mtraining-schedule gather ...

Without --attention-backend mtraining the script runs as it would alone.

commands, each with --help:
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command, or the script of a command line in this process, as its ``__main__``.

    Exits with status 2, and one sentence for each host, for what the user must change.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        _run_command(argv[0], argv[1:])
        return
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. Flags of the script come after it.")
    _start(options.script, options.arguments, options.config)


def _run_command(name: str, argv: Sequence[str]) -> None:
    command = importlib.import_module(f"..{COMMANDS[name].module}", __package__).main
    if name != "doctor":
        command(argv)
        return
    try:
        command(argv, _start)  # the doctor starts a script several times
    except CannotStartError as error:
        end_with(error)


def _parser() -> argparse.ArgumentParser:
    flags = add_arguments(argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS))
    commands = "\n".join(f"  mtraining {name:<10}{command.help}" for name, command in COMMANDS.items())
    parser = CommandParser(
        prog=PROGRAM,
        usage="%(prog)s [--config FILE] script.py [flags of the script]\n       %(prog)s COMMAND ...",
        description=_DESCRIPTION + commands,
        epilog=flags.format_help(),
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML with MODEL_ARGS and ENV_VARS; flags of the line win",
    )
    parser.add_argument("script", help="the training script, pretrain_gpt.py for example")
    flags_of_script = parser.add_argument("arguments", nargs="...", metavar="flags", help="flags of the script")
    flags_of_script.required = False  # else Python 3.11 calls them missing where only the script is
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("megatron-mtraining")
    except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return "(a source tree, not installed)"


def _start(
    script: str, arguments: Sequence[str], config: Sequence[str], before: Callable[[], None] = lambda: None
) -> None:
    """Run a script with its flags and launch configs; ``before`` is called once Megatron may be imported."""
    try:
        _check_script(script)
        if len(config) > 1:
            raise invalid("--config", "given once", ", ".join(config), "Put all flags into one file.")
        launch_config = read_launch_config(*config) if config else LaunchConfig({}, {})
    except ValueError as error:
        end_with(error)
    os.environ.update(launch_config.environment)
    sys.argv = [script, *launch_config.arguments(arguments)]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)  # as ``python script.py`` has it
    print_how_to_start(sys.argv)
    _run(script, before)


def _check_script(script: str) -> None:
    try:
        check_script(script)
    except ValueError as error:  # perhaps a mistyped command
        raise ValueError(with_similar(str(error), script, () if "." in script else COMMANDS)) from error


def _run(script: str, before: Callable[[], None]) -> None:
    try:
        # Only now: the Megatron to import may be beside the script.
        from ..megatron.compat import MissingSymbolError
        from ..megatron.hooks import UsageError, install
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        remedy = f"Supported are {SUPPORTED_MEGATRON}: beside the script, on PYTHONPATH or installed."
        end_with(invalid("Megatron-Core", "a supported release", str(error), remedy))
    try:
        install(prepare_parser=print_errors_once)
        before()
        runpy.run_path(script, run_name="__main__")
    except (MissingSymbolError, UsageError) as error:
        end_with(error)
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        end_with(sentence)
