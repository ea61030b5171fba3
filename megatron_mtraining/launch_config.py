"""Launch configs (``--config run.yaml``): flags and variables of a run, in the form of Megatron's functional tests."""

from __future__ import annotations

import datetime
import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_file import read_yaml
from .errors import invalid

_FLAGS, _ENVIRONMENT = "MODEL_ARGS", "ENV_VARS"
_OF_THE_HARNESS = (
    "TEST_TYPE",
    "LAUNCHER",
    "METRICS",
    "MODE",
    "BEFORE_SCRIPT",
    "AFTER_SCRIPT",
    "THROUGHPUT_TEST_PARAMS",
)
"""Keys that only Megatron's test harness reads."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Content of a launch config."""

    flags: dict[str, tuple[str, ...]]
    """Values of each flag, in the order of the file; empty for a switch."""

    environment: dict[str, str]
    """Variables to set before the script starts."""

    def arguments(self, command_line: Sequence[str]) -> list[str]:
        """Return the flags of the file that ``command_line`` does not set, then ``command_line``."""
        given = {argument.split("=", 1)[0] for argument in command_line}
        from_file = (text for flag, values in self.flags.items() if flag not in given for text in (flag, *values))
        return [*from_file, *command_line]


def read_launch_config(path: str | Path) -> LaunchConfig:
    """Read a launch config::

        ENV_VARS:
          CUDA_DEVICE_MAX_CONNECTIONS: 1
        MODEL_ARGS:
          --num-layers: 4
          --sequence-parallel: true                      # a switch; false omits it
          --data-path: ${DATA}/text_document             # from ENV_VARS or the environment
          --hierarchical-context-parallel-sizes: [4, 2]  # or "[4 2]"

    Raises:
        ValueError: a file that cannot be read, an entry of another form, or a variable that is not set.
    """
    content = read_yaml(path)
    unknown = sorted(set(map(str, content)) - {_FLAGS, _ENVIRONMENT, *_OF_THE_HARNESS})
    if unknown:
        raise invalid("a key of the launch config", f"{_FLAGS} or {_ENVIRONMENT}", f"{', '.join(unknown)} in {path}")
    environment = {
        _variable(name, path): _text(str(name), value) for name, value in _section(content, _ENVIRONMENT, path).items()
    }
    flags = {}
    for flag, value in _section(content, _FLAGS, path).items():
        if not str(flag).startswith("--"):
            raise invalid(f"a key of {_FLAGS}", "a flag with its dashes", f"{flag} in {path}")
        if value is not False:
            flags[flag] = _values(flag, value, os.environ | environment)
    return LaunchConfig(flags, environment)


def check_script(path: str) -> None:
    """Raise ValueError where a command's ``script`` is not a file."""
    if not Path(path).is_file():
        raise invalid("script", "an existing Python file", repr(path), "Give its path, from the current folder.")


def _section(content: Mapping[str, Any], name: str, path: str | Path) -> dict[str, Any]:
    section = content.get(name) or {}
    if not isinstance(section, dict):
        raise invalid(name, "a mapping", f"{type(section).__name__} in {path}")
    return section


def _variable(name: Any, path: str | Path) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise invalid(f"a key of {_ENVIRONMENT}", "the name of a variable", f"{name!r} in {path}")
    return name


def _text(name: str, value: Any) -> str:
    """Return ``value`` as Megatron's harness exports it: ``true`` and ``false`` as in YAML, not as in Python."""
    if not isinstance(value, (str, int, float, datetime.date, type(None))) or "\0" in str(value):
        raise invalid(f"{name} in {_ENVIRONMENT}", "a number, a text, true or false", repr(value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _values(flag: str, value: Any, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of ``flag``: one for a text, even with spaces; several for a list or a bracketed text."""
    if value is True or value is None:
        return ()
    if isinstance(value, str) and re.fullmatch(r"\[[^]]*\]", value):
        value = value[1:-1].split()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, (str, int, float, datetime.date)) for each in values):
        raise invalid(f"{flag} in {_FLAGS}", "a number, a text, a list of them, true or false", value)
    return tuple(_expanded(flag, str(each), environment) for each in values)


def _expanded(flag: str, text: str, environment: Mapping[str, str]) -> str:
    try:
        return string.Template(text).substitute(environment)
    except KeyError as error:
        name = error.args[0]
        raise invalid(f"{flag} in {_FLAGS}", "of variables that are set", f"${{{name}}}", f"Export {name}.") from error
    except ValueError as error:
        raise invalid(f"{flag} in {_FLAGS}", "a text where $ starts a variable", text, "Write $$ for $.") from error
