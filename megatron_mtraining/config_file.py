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
    """Return the mapping that a YAML file holds.

    Raises:
        ValueError: no such file, no YAML, a key twice, something else than a mapping, or no PyYAML to read it with.
    """
    try:
        import yaml
    except ImportError as error:
        raise invalid(
            "PyYAML", "installed to read YAML", "none", "Run pip install 'megatron-mtraining[yaml]'."
        ) from error
    try:
        content = yaml.load(Path(path).read_text(), Loader=_loader_of_unique_keys())
    except RecursionError as error:
        raise invalid("the YAML file", "readable", f"{path}: lists or mappings nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: a date that is none, bytes that are no text
        raise invalid("the YAML file", "readable", f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise invalid("the YAML file", "a mapping", f"{path} with {type(content).__name__}")
    return content


def _loader_of_unique_keys() -> type:
    """Return PyYAML's safe loader, changed to refuse a repeated key instead of taking its last value without a word."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            repeated = next((key for key in keys if keys.count(key) > 1), None)
            if repeated is not None:
                raise yaml.constructor.ConstructorError(
                    problem=f"{repeated} is there twice", problem_mark=node.start_mark
                )
            return super().construct_mapping(node, deep)

    return Loader


def read_config(path: str | Path) -> MTrainingConfig:
    """Return the MTrainingConfig whose fields are the keys of a YAML file.

    Raises:
        ValueError: no such file or field, or a value out of its range.
    """
    content = read_yaml(path)
    fields = [field.name for field in dataclasses.fields(MTrainingConfig)]
    if "lost_rank_timeout_s" in content:
        raise invalid(
            "lost_rank_timeout_s",
            "left out of the configuration",
            f"{content['lost_rank_timeout_s']} in {path}",
            "A dead rank ends the others within the group's timeout. Megatron's --enable-ft-package monitors ranks.",
        )
    unknown = sorted(set(map(str, content)) - set(fields))
    if unknown:
        raise invalid("a key of the YAML file", f"one of {', '.join(fields)}", f"{', '.join(unknown)} in {path}")
    return MTrainingConfig(**content)


def config_from_environment() -> MTrainingConfig:
    """Return the configuration in the file that ``MTRAINING_CONFIG`` names, or the defaults where it names none."""
    path = os.environ.get(CONFIG_VARIABLE)
    return read_config(path) if path else MTrainingConfig()
