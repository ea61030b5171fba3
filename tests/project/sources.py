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


def imported_modules(source: str, module: str, *, is_package: bool = False, runtime: bool = False) -> Iterator[str]:
    """Every module that ``source`` names in an import, lazy ones inside functions too, relative ones made absolute.

    ``from a import b`` yields ``a.b``: b may be a module, and prefixes are what the rules compare. So does the
    attribute ``torch.distributed``, which needs no import of its own.

    Args:
        source: text of the file.
        module: its dotted name.
        is_package: whether it is an ``__init__.py``.
        runtime: leave out what stands under ``if TYPE_CHECKING``, for annotations only.
    """
    package = module if is_package else module.rpartition(".")[0]
    tree = ast.parse(source)
    skipped = set(_typing_only(tree)) if runtime else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def _typing_only(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes under ``if TYPE_CHECKING``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.body:
                yield from ast.walk(statement)


def package_imports(*, runtime: bool = False) -> Iterator[tuple[str, str]]:
    """``(importing module, imported name)`` over the whole package; ``runtime`` as for :func:`imported_modules`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module, is_package = module_name(path), path.name == "__init__.py"
        for name in imported_modules(path.read_text(), module, is_package=is_package, runtime=runtime):
            yield module, name


def is_within(name: str, prefix: str) -> bool:
    """Is ``name`` the module ``prefix`` or something inside it?"""
    return name == prefix or name.startswith(prefix + ".")
