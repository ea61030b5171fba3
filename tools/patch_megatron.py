"""Build the attention backend into a Megatron-LM tree, say whether it fits, and take it out again.

    python -m tools.patch_megatron check  TREE     which patch of patches/ fits, or which of its hunks do not
    python -m tools.patch_megatron apply  TREE     applies it; on a patched tree it does nothing
    python -m tools.patch_megatron revert TREE     restores every byte; on a stock tree it does nothing

TREE is a folder that holds ``megatron/``, in git or not. The patch is found by what applies, not by a version string:
every hunk must find its lines. It needs Python and git, and neither torch nor this package installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1] / "patches"


class TreeError(RuntimeError):
    """Error for a tree that cannot be patched; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One release's patch."""

    path: Path

    @property
    def release(self) -> str:
        """Megatron release that it was made for, as its folder is named."""
        return self.path.parent.name

    @property
    def files(self) -> list[str]:
        """Files it changes, relative to the tree."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text(), re.MULTILINE)

    def fits(self, tree: Path, *, reverse: bool = False) -> bool:
        """Return whether every hunk applies to ``tree``; with ``reverse``, whether every hunk comes out of it."""
        return _git_apply(self, tree, "--check", *(["--reverse"] if reverse else [])).returncode == 0

    def misfits(self, tree: Path) -> list[str]:
        """Return what does not apply: ``file`` where one is missing, ``file:line`` of the patch's hunk elsewhere."""
        missing = [name for name in self.files if not (tree / name).is_file()]
        with tempfile.TemporaryDirectory() as scratch:
            for name in set(self.files) - set(missing):
                (Path(scratch) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / name, Path(scratch) / name)
            excluded = [f"--exclude={name}" for name in missing]
            report = _git_apply(self, Path(scratch), "--reject", "--verbose", *excluded).stderr
        return [f"{name} (no such file)" for name in missing] + list(_rejected_hunks(report))


def known_patches(folder: Path = PATCHES) -> list[Patch]:
    """Return every patch, the newest release first."""
    return [Patch(path) for path in sorted(folder.glob("*/*.patch"), key=lambda path: path.parent.name, reverse=True)]


def applied_patch(tree: Path, patches: list[Patch]) -> Patch | None:
    """Return the patch that is built into ``tree``, or None."""
    return next((patch for patch in patches if patch.fits(tree, reverse=True)), None)


def fitting_patch(tree: Path, patches: list[Patch]) -> Patch:
    """Return the patch that applies to ``tree``.

    Raises:
        TreeError: none does; the message lists the hunks of the closest that do not.
    """
    fitting = next((patch for patch in patches if patch.fits(tree)), None)
    if fitting is not None:
        return fitting
    misfits = {patch.release: patch.misfits(tree) for patch in patches}
    closest = min(misfits, key=lambda release: len(misfits[release]))
    lines = "\n".join(f"  {misfit}" for misfit in misfits[closest])
    raise TreeError(
        f"TREE must be one of {', '.join(misfits)}, got another. The closest patch is that of {closest}, in which "
        f"these hunks find no place:\n{lines}\nUse the launcher, python -m megatron_mtraining, which needs no patch."
    )


def apply(tree: Path, patches: list[Patch]) -> str:
    """Build the backend into ``tree`` unless it is there; return what was done, in a sentence.

    Raises:
        TreeError: no patch applies, or git knows uncommitted changes of the files that it would touch.
    """
    present = applied_patch(tree, patches)
    if present is not None:
        return f"already applied: the patch for {present.release}"
    patch = fitting_patch(tree, patches)
    changed = _uncommitted(tree, patch.files)
    if changed:
        raise TreeError(
            f"TREE must be without uncommitted changes in the files to patch, got {', '.join(changed)}. "
            "Commit or stash them first."
        )
    _must_succeed(_git_apply(patch, tree))
    return f"applied the patch for {patch.release} to {', '.join(patch.files)}"


def revert(tree: Path, patches: list[Patch]) -> str:
    """Take the backend out of ``tree`` if it is there; return what was done, in a sentence.

    Raises:
        TreeError: the tree is neither stock nor patched.
    """
    present = applied_patch(tree, patches)
    if present is None:
        return f"not applied: {fitting_patch(tree, patches).release} as released"
    _must_succeed(_git_apply(present, tree, "--reverse"))
    return f"reverted the patch for {present.release} in {', '.join(present.files)}"


def check(tree: Path, patches: list[Patch]) -> str:
    """Return the state of ``tree``, in a sentence.

    Raises:
        TreeError: the tree is neither stock nor patched.
    """
    present = applied_patch(tree, patches)
    if present is not None:
        return f"already applied: the patch for {present.release}"
    return f"fits: the patch for {fitting_patch(tree, patches).release}"


def main(arguments: list[str] | None = None) -> int:
    """Run one action; the exit status is 1 when the tree cannot be patched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("check", "apply", "revert"))
    parser.add_argument("tree", type=Path, help="folder that holds megatron/")
    options = parser.parse_args(arguments)
    try:
        if shutil.which("git") is None:
            raise TreeError("git must be on PATH, got none. Install git.")
        if not (options.tree / "megatron" / "core").is_dir():
            raise TreeError(f"TREE must be a folder that holds megatron/core, got {options.tree}.")
        act = {"check": check, "apply": apply, "revert": revert}[options.action]
        print(act(options.tree.resolve(), known_patches()))
    except TreeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _git_apply(patch: Patch, tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Below the ceiling git looks for no repository, so a tree inside another one is not taken for a part of it: there
    # git would pass over every path that does not start with the tree's own.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent), "LC_ALL": "C"}
    command = ["git", "apply", "--whitespace=nowarn", *options, str(patch.path.resolve())]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def _must_succeed(run: subprocess.CompletedProcess[str]) -> None:
    if run.returncode != 0:
        raise TreeError(f"git apply must succeed after its check did, got: {run.stderr.strip()}")


def _rejected_hunks(report: str) -> Iterator[str]:
    """Return ``file:line`` of each hunk that ``git apply --reject --verbose`` says it could not place."""
    return (match.group(1) for match in re.finditer(r"^error: patch failed: (\S+:\d+)$", report, re.MULTILINE))


def _uncommitted(tree: Path, files: list[str]) -> list[str]:
    """Return those of ``files`` that git says are changed; none where the tree is not in git."""
    run = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", *files],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    return [line[3:] for line in run.stdout.splitlines()] if run.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
