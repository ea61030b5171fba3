"""Command-line flags: one for each field of MTrainingConfig, made from the dataclass.

Beside them, the parser that the commands of this package share.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from .config import MTrainingConfig

_PREFIX = "mtraining_"
BACKEND = "mtraining"
"""Choice of Megatron's ``--attention-backend`` that asks for this attention."""


class CommandParser(argparse.ArgumentParser):
    """Parser of a command of this package: no abbreviations; the error for an unknown flag names a similar one."""

    def __init__(self, **options: Any) -> None:
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | options
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one sentence, ``message``."""
        sentence = re.sub(r"^argument ([^\s/:]+)\S*: must be", r"\1 must be", with_similar_flag(message, self))
        self.exit(2, f"{self.prog}: error: {sentence}\n")


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
    """Add ``--mtraining-<field>`` for each field of :class:`megatron_mtraining.MTrainingConfig`.

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
    return parser


def config_from_args(args: argparse.Namespace) -> MTrainingConfig:
    """Return the MTrainingConfig that the parsed flags describe.

    Raises:
        ValueError: a value out of its range.
    """
    names = (field.name for field in dataclasses.fields(MTrainingConfig))
    return MTrainingConfig(**{name: getattr(args, _PREFIX + name) for name in names})


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
