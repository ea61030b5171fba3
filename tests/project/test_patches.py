"""The source patches apply to the releases they are named after, and the tool that applies them undoes all it did."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.patch_megatron import (
    TEMPLATE,
    Patch,
    TreeError,
    applied_patch,
    apply,
    check,
    fitting_patch,
    known_patches,
    make,
    revert,
)

from .sources import ROOT

RELEASES = {
    "core_0.16": "core_v0.16.1",
    "core_0.17": "core_v0.17.1",
    "core_0.18": "core_v0.18.2",
    "core_0.19": "core_v0.19.0",
    "main": "main",
}
"""Each patch's folder, and the released tree under ``MEGATRON_TREES`` that it is tested on."""

STOCK = "".join(f"line {number}\n" for number in range(40))
PATCH = """\
--- a/megatron/core/first.py
+++ b/megatron/core/first.py
@@ -2,3 +2,4 @@
 line 1
 line 2
+added
 line 3
@@ -30,3 +31,4 @@
 line 29
 line 30
+added
 line 31
--- a/megatron/training/second.py
+++ b/megatron/training/second.py
@@ -10,3 +10,3 @@
 line 9
-line 10
+line ten
 line 11
"""


def contents(tree: Path) -> dict[str, bytes]:
    files = (path for path in sorted(tree.rglob("*")) if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(tree)): path.read_bytes() for path in files}


def copy_of(tree: Path, files: list[str], destination: Path) -> Path:
    for name in files:
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / name, destination / name)
    return destination


@pytest.fixture
def tree(tmp_path):
    """A tree of two files that the patch fits."""
    for name in ("megatron/core/first.py", "megatron/training/second.py"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(STOCK)
    return tmp_path / "tree"


@pytest.fixture
def patches(tmp_path):
    (tmp_path / "patches" / "release").mkdir(parents=True)
    path = tmp_path / "patches" / "release" / "attention_backend.patch"
    path.write_text(PATCH)
    return [Patch(path)]


def git(tree: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)


def commit_all(tree: Path) -> None:
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "as released")


def test_apply_and_revert_are_idempotent_and_exact(tree, patches):
    stock = contents(tree)
    assert check(tree, patches) == "fits: the patch for release"
    assert apply(tree, patches).startswith("applied the patch for release to megatron/core/first.py, ")
    patched = contents(tree)
    assert patched["megatron/training/second.py"] == STOCK.replace("line 10\n", "line ten\n").encode()
    assert patched["megatron/core/first.py"].count(b"added\n") == 2
    assert apply(tree, patches) == check(tree, patches) == "already applied: the patch for release"
    assert contents(tree) == patched
    assert revert(tree, patches).startswith("reverted the patch for release")
    assert contents(tree) == stock
    assert revert(tree, patches) == "not applied: release as released"
    assert contents(tree) == stock


@pytest.mark.parametrize("action", [check, apply, revert])
def test_every_hunk_without_a_place_is_named(tree, patches, action):
    first = tree / "megatron/core/first.py"
    first.write_text(STOCK.replace("line 30\n", "other\n"))
    (tree / "megatron/training/second.py").unlink()
    before = contents(tree)
    with pytest.raises(TreeError, match="The closest patch is that of release") as refusal:
        action(tree, patches)
    misfits = [line.strip() for line in str(refusal.value).splitlines() if line.startswith("  ")]
    assert misfits == ["megatron/training/second.py (no such file)", "megatron/core/first.py:30"]
    assert contents(tree) == before


def test_a_change_elsewhere_in_a_patched_file_outlives_the_revert(tree, patches):
    apply(tree, patches)
    first = tree / "megatron/core/first.py"
    first.write_text(first.read_text().replace("line 20\n", "mine\n"))
    revert(tree, patches)
    assert first.read_text() == STOCK.replace("line 20\n", "mine\n")


def test_uncommitted_changes_are_an_error(tree, patches):
    commit_all(tree)
    first = tree / "megatron/core/first.py"
    first.write_text(STOCK.replace("line 20\n", "mine\n"))
    with pytest.raises(TreeError, match=r"without uncommitted changes .* got megatron/core/first\.py\. Commit"):
        apply(tree, patches)
    assert applied_patch(tree, patches) is None
    git(tree, "commit", "-am", "mine")
    apply(tree, patches)
    assert applied_patch(tree, patches) is patches[0]


def test_a_tree_inside_another_repository_is_patched(tree, patches):
    """There ``git apply`` passes over paths that do not start with the tree's own, and reports success."""
    (tree.parent / ".gitignore").write_text("tree\n")
    git(tree.parent, "init")
    apply(tree, patches)
    assert b"added\n" in contents(tree)["megatron/core/first.py"]
    revert(tree, patches)
    assert contents(tree)["megatron/core/first.py"] == STOCK.encode()


def test_command_line_names_a_folder_that_is_no_tree(tmp_path):
    command = [sys.executable, "-m", "tools.patch_megatron", "check", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == f"TREE must be a folder that holds megatron/core, got {tmp_path}.\n"


def test_each_supported_release_has_a_patch():
    assert [patch.release for patch in known_patches()] == sorted(RELEASES, reverse=True)


@pytest.mark.parametrize("patch", known_patches(), ids=lambda patch: patch.release)
def test_patches_are_small_and_guarded(patch):
    """Few lines in few files; the package is imported only under a condition, so inside an indented block."""
    lines = patch.path.read_text().splitlines()
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert len(added) <= 40
    assert len(patch.files) <= 6
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]
    assert all(line.startswith("    ") for line in added if "import" in line and "megatron_mtraining" in line)


def added_lines(text: str) -> list[str]:
    return [line[1:] for line in text.splitlines() if line.startswith("+") and not line.startswith("+++")]


@pytest.mark.parametrize("patch", known_patches(), ids=lambda patch: patch.release)
def test_patches_add_the_lines_of_the_template(patch):
    number = int("megatron/core/models/mamba/mamba_model.py" in patch.files)
    template = re.sub(r"\{(\w+) \| (\w+)\}", lambda words: words[1 + number], TEMPLATE.read_text())
    assert added_lines(patch.path.read_text()) == added_lines(template)


def test_a_tree_without_the_lines_of_the_template_is_named(tree):
    with pytest.raises(TreeError, match=r"TREE must have megatron/core/transformer/enums.py, got none"):
        make(tree)
    (tree / "megatron/core/transformer").mkdir()
    (tree / "megatron/core/transformer/enums.py").write_text("class AttnBackend:\n    other = 5\n")
    with pytest.raises(TreeError, match=r"enums.py must have the lines of the template below 'class AttnBackend', got"):
        make(tree)


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_patch_of_a_released_tree(release, tmp_path):
    folder = os.environ.get("MEGATRON_TREES")
    if not folder or not (Path(folder) / RELEASES[release]).is_dir():
        pytest.skip(f"needs the tree {RELEASES[release]} in the folder that MEGATRON_TREES names")
    patches = known_patches()
    files = sorted({name for patch in patches for name in patch.files})
    released = Path(folder) / RELEASES[release]
    tree = copy_of(released, [name for name in files if (released / name).is_file()], tmp_path / "tree")
    assert [patch.release for patch in patches if patch.fits(tree)] == [release]
    assert make(tree) == next(patch.path.read_text() for patch in patches if patch.release == release)
    applied_and_reverted(tree, patches)


def test_patch_of_the_installed_release(tmp_path):
    """The wheels hold the released files: those of core 0.19 all that is patched, those of 0.16 the part in core."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None:
        pytest.skip("needs megatron-core")
    installed = Path(spec.submodule_search_locations[0]).parents[1]
    patches = [Patch(only_core(patch, tmp_path)) for patch in known_patches()]
    if (installed / "megatron" / "training").is_dir():
        patches = known_patches()
    files = sorted({name for patch in patches for name in patch.files if (installed / name).is_file()})
    tree = copy_of(installed, files, tmp_path / "tree")
    fitting = fitting_patch(tree, patches)
    if (installed / "megatron" / "training").is_dir():
        assert make(tree) == fitting.path.read_text()
    applied_and_reverted(tree, patches)


def applied_and_reverted(tree: Path, patches: list[Patch]) -> None:
    stock = contents(tree)
    apply(tree, patches)
    for name, content in contents(tree).items():
        compile(content, name, "exec")
    assert contents(tree) != stock
    revert(tree, patches)
    assert contents(tree) == stock


def only_core(patch: Patch, folder: Path) -> Path:
    """The part of a patch that changes ``megatron/core``."""
    parts = patch.path.read_text().split("--- a/")[1:]
    path = folder / "core" / patch.release / patch.path.name
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"--- a/{part}" for part in parts if part.startswith("megatron/core/")))
    return path
