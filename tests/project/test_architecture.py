"""The numbers of docs/architecture.md are counted, and its lists name files that exist."""

from __future__ import annotations

import re

import pytest

from .sources import PACKAGE, ROOT, is_within, package_imports
from .test_imports import MAY_IMPORT, part_of

TEXT = (ROOT / "docs" / "architecture.md").read_text()
BOUNDS = {
    cells[0].replace("`", ""): int(cells[2])
    for line in TEXT.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 3 and cells[2].isdigit()
}
COMMANDS = ("doctor", "commands", "recall", "evaluate", "hf")


def listed(heading: str) -> list[str]:
    section = TEXT.split(f"## {heading}")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)


def size(paths) -> tuple[int, int]:
    """Number of files, and of their lines."""
    texts = [path.read_text() for path in paths]
    return len(texts), sum(text.count("\n") for text in texts)


def counted() -> dict[str, int]:
    everything = list(PACKAGE.rglob("*.py"))
    core = [path for path in everything if path.relative_to(PACKAGE).parts[0] not in COMMANDS]
    upward = [
        (module, name)
        for module, name in package_imports()
        if part_of(module) and is_within(name, "megatron_mtraining")
        if part_of(name) not in MAY_IMPORT[part_of(module)] | {part_of(module)}
    ]
    return {
        "files of the package": size(everything)[0],
        "lines of the package": size(everything)[1],
        "files of the training path": size(core)[0],
        "lines of the training path": size(core)[1],
        "lines of planner/": size((PACKAGE / "planner").glob("*.py"))[1],
        "files to open for the ring's forward": len(listed("The ring's forward")),
        "files to open for a vertical-slash selection": len(listed("A vertical-slash selection")),
        "imports against the direction of DESIGN.md": len(upward),
    }


def test_every_bound_is_counted():
    assert set(BOUNDS) == set(counted())


@pytest.mark.parametrize("name", BOUNDS)
def test_counts_are_within_their_bounds(name):
    assert 0.9 * BOUNDS[name] <= counted()[name] <= BOUNDS[name]


@pytest.mark.parametrize("heading", ["The ring's forward", "A vertical-slash selection"])
def test_listed_files_exist(heading):
    assert listed(heading)
    assert not [name for name in listed(heading) if not (PACKAGE / name).is_file()]
