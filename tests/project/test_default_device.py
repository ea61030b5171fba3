"""No table of the host lands on a GPU because that is torch's default device, as it is where Megatron builds models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .sources import PACKAGE

FACTORIES = frozenset("arange as_tensor empty eye full linspace ones rand randint randn tensor zeros".split())
COMMANDS_ONLY = ("planner", "testing", "commands", "recall", "evaluate")
"""Parts that run in processes of their own."""


def factories_without_device(path: Path) -> Iterator[str]:
    for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        is_factory = name.startswith("torch.") and name.removeprefix("torch.") in FACTORIES
        if is_factory and "device" not in {keyword.arg for keyword in call.keywords}:
            yield f"{path.relative_to(PACKAGE)}:{call.lineno} {name}"


def test_every_factory_names_its_device():
    parts = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in COMMANDS_ONLY]
    assert not [found for path in parts for found in factories_without_device(path)]
