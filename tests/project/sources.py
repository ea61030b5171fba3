"""What the project's tests read: the repository's files, and the imports in a Python file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_mtraining"


def module_name(path: Path) -> str:
    """The dotted name under which ``path`` inside the repository is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Every module that ``source`` names in an import, lazy ones inside functions too, relative ones made absolute.

    ``from a import b`` yields ``a.b``: b may be a module, and prefixes are what the rules compare.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def package_imports() -> Iterator[tuple[str, str]]:
    """``(importing module, imported name)`` over the whole package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = module_name(path)
        for name in imported_modules(path.read_text(), module, is_package=path.name == "__init__.py"):
            yield module, name


def is_within(name: str, prefix: str) -> bool:
    """Is ``name`` the module ``prefix`` or something inside it?"""
    return name == prefix or name.startswith(prefix + ".")
