"""A configuration from a file, for programs that have no command line of their own to put flags on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from .config import MTrainingConfig
from .errors import invalid

CONFIG_VARIABLE = "MTRAINING_CONFIG"
"""The environment variable that names such a file."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ValueError: no such file, no YAML, something else than a mapping, or no PyYAML to read it with.
    """
    try:
        import yaml
    except ImportError as error:
        raise invalid(
            "PyYAML", "installed to read YAML", "none", "Run pip install 'megatron-mtraining[yaml]'."
        ) from error
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise invalid("the YAML file", "readable", f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise invalid("the YAML file", "a mapping", f"{path} with {type(content).__name__}")
    return content


def read_config(path: str | Path) -> MTrainingConfig:
    """The MTrainingConfig whose fields are the keys of a YAML file.

    Raises:
        ValueError: no such file or field, or a value out of its range.
    """
    content = read_yaml(path)
    fields = [field.name for field in dataclasses.fields(MTrainingConfig)]
    unknown = sorted(set(map(str, content)) - set(fields))
    if unknown:
        raise invalid("a key of the YAML file", f"one of {', '.join(fields)}", f"{', '.join(unknown)} in {path}")
    return MTrainingConfig(**content)


def config_from_environment() -> MTrainingConfig:
    """What the file that ``MTRAINING_CONFIG`` names says, or the defaults where it names none."""
    path = os.environ.get(CONFIG_VARIABLE)
    return read_config(path) if path else MTrainingConfig()
