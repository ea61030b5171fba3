"""Command-line flags: one for each field of MTrainingConfig, made from the dataclass, and the health monitor's.

Beside them, the parser that the commands of this package share.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from .config import MTrainingConfig
from .errors import invalid

_PREFIX = "mtraining_"
BACKEND = "mtraining"
"""Choice of Megatron's ``--attention-backend`` that asks for this attention."""

HEALTH_MONITOR_FLAG = "--mtraining-health-monitor-timeout-s"


class CommandParser(argparse.ArgumentParser):
    """Parser of a command of this package: no abbreviations; the error for an unknown flag names a similar one."""

    def __init__(self, **options: Any) -> None:
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | options
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """End with status 2 and ``message``."""
        super().error(with_similar_flag(message, self))


def with_similar_flag(message: str, parser: argparse.ArgumentParser) -> str:
    """Return an argparse error, with a flag of ``parser`` that resembles the unknown one it names, if there is one."""
    prefix, _, unknown = message.partition("unrecognized arguments: ")
    flag = next((text.split("=")[0] for text in unknown.split() if text.startswith("--") and not prefix), None)
    return message if flag is None else with_similar(message, flag, parser._option_string_actions)


def with_similar(message: str, text: str, names: Iterable[str]) -> str:
    """Return ``message`` with those of ``names`` that resemble ``text``; unchanged if none does."""
    similar = difflib.get_close_matches(text, list(names))
    return f"{message.removesuffix('.')}. Did you mean {' or '.join(similar)}?" if similar else message


def add_arguments(
    parser: argparse.ArgumentParser, *, defaults: MTrainingConfig | None = None
) -> argparse.ArgumentParser:
    """Add ``--mtraining-<field>`` for each field of :class:`megatron_mtraining.MTrainingConfig`, and the monitor's.

    Type, choices and help come from the dataclass; its own checks run in :func:`config_from_args`. A parser that has
    the flags already is left as it is, so that a launcher, a patched Megatron and a script may all add them.

    Args:
        parser: any parser, Megatron's for example.
        defaults: where the flags' defaults come from. Default: the dataclass's own.

    Returns:
        The same parser, so that it can serve as Megatron's ``extra_args_provider``.
    """
    if parser.get_default(_PREFIX + "layout") is not None:
        return parser
    defaults = defaults or MTrainingConfig()
    group = parser.add_argument_group("mtraining", "vertical-slash sparse attention")
    hints, docs = get_type_hints(MTrainingConfig), _field_docs()
    for field in dataclasses.fields(MTrainingConfig):
        group.add_argument(
            "--" + (_PREFIX + field.name).replace("_", "-"),
            dest=_PREFIX + field.name,
            default=getattr(defaults, field.name),
            help=docs[field.name].replace("``", "").replace("%", "%%"),
            **_parsing(hints[field.name]),
        )
    group.add_argument(
        HEALTH_MONITOR_FLAG,
        type=int,
        default=0,
        metavar="SECONDS",
        help="start the health monitor: a rank that died is named by every other one, which then ends; the ranks of a "
        "host count as lost after so many seconds without a heartbeat. 0 starts none",
    )
    return parser


def config_from_args(args: argparse.Namespace) -> MTrainingConfig:
    """Return the MTrainingConfig that the parsed flags describe.

    Raises:
        ValueError: a value out of its range.
    """
    names = (field.name for field in dataclasses.fields(MTrainingConfig))
    return MTrainingConfig(**{name: getattr(args, _PREFIX + name) for name in names})


def health_monitor_timeout_s(args: argparse.Namespace) -> int:
    """Return the seconds without a heartbeat after which a host counts as lost; 0 without a health monitor.

    Raises:
        ValueError: the value is negative, or ranks are to be restarted in place.
    """
    timeout_s = args.mtraining_health_monitor_timeout_s
    if timeout_s < 0:
        raise invalid(HEALTH_MONITOR_FLAG, "at least 0", timeout_s)
    if timeout_s and getattr(args, "inprocess_restart", False):
        raise ValueError(
            f"unsupported: {HEALTH_MONITOR_FLAG} with --inprocess-restart. It ends every rank; leave one out."
        )
    return timeout_s


def _parsing(hint: Any) -> dict[str, Any]:
    """Return argparse's options for a field of type ``hint``."""
    if get_origin(hint) is Literal:
        return {"type": str, "choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"type": get_args(hint)[0], "nargs": "*", "metavar": "N"}
    plain = next((each for each in get_args(hint) if each is not NoneType), hint)  # of ``float | None``
    return {"type": plain, "metavar": plain.__name__.upper()}


def _field_docs() -> dict[str, str]:
    """Return the string that stands under each field in the source of MTrainingConfig."""
    body = ast.parse(textwrap.dedent(inspect.getsource(MTrainingConfig))).body[0].body
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in zip(body[:-1], body[1:], strict=True)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
