"""What the documents promise exists: links, commands, files; and they speak of the project only."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining.launch.cli import COMMANDS

from .sources import ROOT

FOLDERS = ("csrc", "docker", "docs", "examples", "patches")
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND_LINE = re.compile(r"^\s*(?:\$ )?(make|mtraining|python3?|torchrun|pip|bash) .*$", re.MULTILINE)
OTHERS = {"torch.distributed.run", "pytest", "pip"}
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt|scratch|opt)/")


def make_targets() -> set[str]:
    """The targets that a person may type, from the Makefile's .PHONY line."""
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    return set(phony.group(1).split())


def code_blocks(text: str) -> list[str]:
    """The fenced blocks of a Markdown document."""
    return re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def report(faults: dict[Path, list[str]]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}: {', '.join(found)}" for path, found in faults.items() if found)


@functools.cache
def anchors(document: Path) -> set[str]:
    """Names of a document's headings in links."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_link(document: Path, target: str) -> bool:
    if re.match(r"https?://|mailto:", target):
        return False
    path, _, anchor = target.partition("#")
    linked = (document.parent / path).resolve() if path else document
    return not linked.exists() or (bool(anchor) and linked.suffix == ".md" and anchor not in anchors(linked))


def test_links_and_their_headings_exist():
    assert not report(
        {path: [link for link in LINK.findall(path.read_text()) if broken_link(path, link)] for path in DOCUMENTS}
    )


def unknown_commands(document: Path) -> list[str]:
    """Make targets, scripts and modules of code blocks that are missing."""
    unknown = []
    for block in code_blocks(document.read_text()):
        for line in (match.group(0) for match in COMMAND_LINE.finditer(block)):
            words = line.replace("$ ", "").split("#")[0].split()
            if words[0] == "make":
                targets = [word for word in words[1:] if "=" not in word and not word.startswith(("-", '"', "'"))]
                unknown += [f"make {target}" for target in targets[:1] if target not in make_targets()]
            is_command = (
                words[0] == "mtraining" and re.fullmatch("[a-z]+", words[1]) and words[1] != "iteration"
            )  # a log
            unknown += [f"mtraining {words[1]}"] if is_command and words[1] not in COMMANDS else []
            scripts = [word for word in words[1:] if re.fullmatch(r"[\w./-]+\.(py|sh)", word)]
            unknown += [word for word in scripts if "/" in word and not (ROOT / word).exists()]
    named = set(re.findall(r"(?<!\S)-m ([a-z_]+(?:\.\w+)*)", document.read_text()))
    own = {name for name in named if name.split(".")[0] in ("examples", "tools", "megatron_mtraining")}
    return unknown + sorted(name for name in own if not is_module(name)) + sorted(named - own - OTHERS)


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_commands_exist():
    """Of code blocks; and ``python -m`` anywhere in a document."""
    assert not report({path: unknown_commands(path) for path in DOCUMENTS})


def test_no_paths_of_one_machine():
    assert not report({path: MACHINE_PATHS.findall(path.read_text()) for path in DOCUMENTS})


def test_readme_leads_with_the_two_commands():
    first = code_blocks((ROOT / "README.md").read_text())[0]
    assert re.search(r"^(\$ )?make demo", first, re.MULTILINE)
    assert re.search(r"^(\$ )?make test", first, re.MULTILINE)


def dry_make(*words: str) -> subprocess.CompletedProcess:
    """make's own dry run, as from a shell: of the make that may run these tests it inherits nothing."""
    inherited = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "PYTHON", "VENV", "TORCH"}
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    return subprocess.run(["make", "-n", *words], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_make_targets_expand():
    """The recipes parse and name a command."""
    for target in ("demo", "test", "lint", "docs", "kernels", "sanitize", "wheels", "clean"):
        run = dry_make("-o", ".venv/.mtraining-ready", target)
        assert (run.returncode, bool(run.stdout.strip())) == (0, True), run.stderr


@pytest.mark.parametrize(("version", "is_made_anew"), [("3 9", True), ("{} {}".format(*sys.version_info), False)])
def test_an_environment_of_another_python_is_made_anew(tmp_path, version, is_made_anew):
    """make demo PYTHON=python3.12 beside an environment of 3.11 must not run on 3.11."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f"#!/bin/sh\necho {version}\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / ".mtraining-ready").touch()
    run = dry_make("demo", f"VENV={tmp_path}", f"PYTHON={sys.executable}")
    assert ("setup_venv.sh" in run.stdout) == is_made_anew, run.stdout + run.stderr
    assert "setup_venv.sh" not in dry_make("demo", f"VENV={tmp_path}").stdout


SETTING_UP = """
case "$*" in
*--constraint*) while [ "$1" != --constraint ]; do shift; done; cat "$2" >&2 ;;
-m*) ;;
*) PYTHONPATH={folder} exec {python} "$@" ;;
esac
"""


def test_the_current_torch_is_kept_by_the_version_that_pip_knows(tmp_path):
    """PyPI's torch 2.11.0 calls itself 2.11.0+cu130, which pip finds nowhere."""
    (tmp_path / "torch.py").write_text("__version__ = '9.8.7+cu130'\n")
    (tmp_path / "torch-9.8.7.dist-info").mkdir()
    (tmp_path / "torch-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.8.7\n")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n" + SETTING_UP.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    run = subprocess.run(["tools/setup_current.sh", python], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, set(run.stderr.splitlines())) == (0, {"torch==9.8.7"})


def test_constraints_that_pip_cannot_meet_are_named(tmp_path):
    """NGC's containers set PIP_CONSTRAINT, and pin what Megatron-Core or the tests want newer."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ]\n')
    python.chmod(0o755)
    for constraint in ("", "pins.txt"):
        environment = os.environ | {"PIP_CONSTRAINT": constraint}
        command = ["tools/setup_current.sh", python]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 1
        assert ("PIP_CONSTRAINT may pin what must be newer, got pins.txt. " in run.stderr) == bool(constraint)


def test_changelog_has_an_unreleased_section():
    assert re.search(r"^## \[Unreleased\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_license_is_stated():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert 'license="Apache-2.0"' in (ROOT / "setup.py").read_text()
