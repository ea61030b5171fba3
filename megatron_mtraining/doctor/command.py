"""``python -m megatron_mtraining doctor``: alone for this machine, before a script for a model, its flags and data."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from ..arguments import CommandParser
from ..launch_config import check_script
from ..ranks import is_first_rank
from . import CannotStartError

_DESCRIPTION = """\
Alone, describes this machine: what is installed, which kernels would compute, and what would be replaced in Megatron.

  torchrun ... -m megatron_mtraining doctor pretrain_gpt.py FLAGS

checks a model with its own flags and data on a few layers and steps; see docs/doctor.md.
Exit codes: 0 every check passed, 1 a fault found, 2 cannot start here."""


Start = Callable[[str, Sequence[str], Sequence[str], Callable[[], None]], None]
"""Function that runs a script with flags and launch configs, and calls its argument once Megatron may be imported."""


def main(argv: Sequence[str], start: Start) -> None:
    """Run the doctor, which starts a script several times, and exit with its exit code.

    Raises:
        CannotStartError: it cannot start here.
    """
    options = _parser().parse_args(argv)
    with _stdout_reserved() as page:
        try:
            text, exit_code = _model(options, start) if options.script else _machine(options)
        except CannotStartError as error:
            if options.json and is_first_rank():
                print(json.dumps({"exit_code": 2, "error": str(error)}), file=page, flush=True)
            raise
        if is_first_rank() or not options.script:
            print(text, file=page, flush=True)
    if options.script:
        _wait_for_all()  # torchrun ends every rank once one has failed
    sys.exit(exit_code)


def _model(options: argparse.Namespace, start: Start) -> tuple[str, int]:
    try:
        check_script(options.script)
    except ValueError as error:
        raise CannotStartError(str(error)) from error
    if "RANK" not in os.environ:
        raise CannotStartError(
            "torchrun must start the ranks, got no RANK in the environment. "
            "Run: torchrun --nproc-per-node N -m megatron_mtraining doctor pretrain_gpt.py FLAGS"
        )
    from .examination import examine  # Megatron is imported only where its script is started

    report = examine(lambda before: start(options.script, options.arguments, options.config, before))
    return (report.as_json() if options.json else report.as_text()), report.exit_code


def _machine(options: argparse.Namespace) -> tuple[str, int]:
    from .machine import describe, faults_of, page_of

    found = describe()
    exit_code = int(bool(faults_of(found)))
    return (json.dumps(found | {"exit_code": exit_code}) if options.json else page_of(found)), exit_code


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="mtraining doctor",
        usage="%(prog)s [--json] [--config FILE] [script.py [flags of the script]]",
        description=_DESCRIPTION,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="as for a run")
    parser.add_argument("script", nargs="?", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="flags", help="what the script is given")
    return parser


@contextlib.contextmanager
def _stdout_reserved() -> Iterator[TextIO]:
    """Redirect what others print, such as Megatron's log, to the standard error; yield the standard output."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(stdout), "w") as page:
            yield page
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _wait_for_all() -> None:
    from ..transport.process_group import gather_numbers

    gather_numbers([0.0])
