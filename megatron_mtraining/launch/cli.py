"""The command line: ``torchrun ... -m megatron_mtraining [--config run.yaml] script.py [flags of the script]``.

``python -m megatron_mtraining plan ...`` plans a run instead of starting one; see ``planner/command.py``.
``python -m megatron_mtraining doctor ...`` examines a machine, or a model with its flags; see ``doctor/command.py``.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..arguments import add_arguments
from ..doctor.command import Launcher
from ..doctor.command import main as doctor
from ..doctor.errors import CannotStartError
from ..errors import SUPPORTED_MEGATRON, invalid
from ..planner.command import main as plan
from ..run_file import RunFile, read_run_file
from .report import PROGRAM, UsageError, end_with, say_how_to_start

_DESCRIPTION = """\
Runs an unchanged Megatron-LM training script, which then understands --attention-backend mtraining:

  torchrun --nproc-per-node 8 -m megatron_mtraining pretrain_gpt.py \\
      --attention-backend mtraining --context-parallel-size 8 --mtraining-schedule gather ...

Without --attention-backend mtraining the script runs as it would alone.

  python -m megatron_mtraining plan --help

plans such a run: parallel sizes, memory, time, flags.

  python -m megatron_mtraining doctor --help

examines this machine, or whether a model with its flags and data is computed right."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script of a command line in this process, as its ``__main__``.

    Exits with status 2, and one sentence for each host, for what the user must change.
    """
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:1]) == ["plan"]:
        plan(argv[1:])
        return
    if list(argv[:1]) == ["doctor"]:
        _examine(argv[1:])
        return
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. Flags of the script come after it.")
    _start(options.script, options.arguments, options.config)


def _parser() -> argparse.ArgumentParser:
    flags = add_arguments(argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS))
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s [--config FILE] script.py [flags of the script]",
        description=_DESCRIPTION,
        epilog=flags.format_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML with MODEL_ARGS and ENV_VARS; flags of the line win",
    )
    parser.add_argument("script", help="the training script, pretrain_gpt.py for example")
    flags_of_script = parser.add_argument("arguments", nargs="...", metavar="flags", help="what the script is given")
    flags_of_script.required = False  # else Python 3.11 calls them missing where only the script is
    return parser


def _start(
    script: str, arguments: Sequence[str], config: Sequence[str], before: Callable[[], None] = lambda: None
) -> None:
    """Run a script with its flags and run files; ``before`` is called once Megatron may be imported."""
    try:
        if not Path(script).is_file():
            raise invalid("script", "a Python file", f"{script!r}, which is none", "Give its path from here.")
        if len(config) > 1:
            raise invalid("--config", "given once", ", ".join(config), "Put all flags into one file.")
        run_file = read_run_file(*config) if config else RunFile({}, {})
    except ValueError as error:
        end_with(error)
    os.environ.update(run_file.environment)
    sys.argv = [script, *run_file.arguments(arguments)]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)  # as ``python script.py`` has it
    say_how_to_start(sys.argv)
    _run(script, before)


def _run(script: str, before: Callable[[], None]) -> None:
    try:
        # Only now: the Megatron to import may stand beside the script.
        from ..megatron.compat import MissingSymbolError
        from .flag_errors import sentence_of
        from .hooks import install
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        remedy = f"Supported are {SUPPORTED_MEGATRON}: beside the script, on PYTHONPATH or installed."
        end_with(invalid("Megatron-Core", "a supported release", str(error), remedy))
    try:
        install()
        before()
        runpy.run_path(script, run_name="__main__")
    except (MissingSymbolError, UsageError) as error:
        end_with(error)
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        end_with(sentence)


def _examine(argv: Sequence[str]) -> None:
    def install_hooks() -> tuple[str, ...]:
        from .hooks import install

        return install()

    try:
        doctor(argv, Launcher(_start, install_hooks))
    except CannotStartError as error:
        end_with(error)
