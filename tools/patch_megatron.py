"""Build the attention backend into a Megatron-LM tree, check whether it fits, and remove it again.

    python -m tools.patch_megatron check  TREE     which patch of patches/ fits, or which of its hunks do not
    python -m tools.patch_megatron apply  TREE     applies it; on a patched tree it does nothing
    python -m tools.patch_megatron revert TREE     restores every byte; on a stock tree it does nothing
    python -m tools.patch_megatron make   TREE     prints the patch of that stock tree, made of patches/*.template

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
TEMPLATE = PATCHES / "attention_backend.template"


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
    """Return the patch that was applied to ``tree``, or None."""
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
        f"these hunks do not apply:\n{lines}\nUse the launcher, python -m megatron_mtraining, which needs no patch."
    )


def apply(tree: Path, patches: list[Patch]) -> str:
    """Build the backend into ``tree`` unless it is there; return what was done, in a sentence.

    Raises:
        TreeError: no patch applies, or the files to patch have uncommitted changes.
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
    """Remove the backend from ``tree`` if it is there; return what was done, in a sentence.

    Raises:
        TreeError: the tree is neither stock nor patched.
    """
    present = applied_patch(tree, patches)
    if present is None:
        return f"not applied: {fitting_patch(tree, patches).release} as released"
    _must_succeed(_git_apply(present, tree, "--reverse"))
    return f"reverted the patch for {present.release} in {', '.join(present.files)}"


def make(tree: Path) -> str:
    """Return the patch of a stock ``tree`` in the form of those in ``patches/``, made of the template.

    Raises:
        TreeError: a file of the template is missing, or has no such lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        for part in re.split(r"^--- ", TEMPLATE.read_text(), flags=re.MULTILINE)[1:]:
            names, *hunks = re.split(r"^@@ ", part, flags=re.MULTILINE)
            present = [(tree / name).is_file() for name in names.strip().split(" | ")]
            if True not in present:
                raise TreeError(f"TREE must have {names.strip()}, got none.")
            name = names.strip().split(" | ")[present.index(True)]
            lines = stock = (tree / name).read_text().splitlines()
            for hunk in hunks:
                scope, *wanted = _chosen(hunk, present.index(True)).splitlines()
                lines = _with_hunk(lines, name, scope, wanted)
            for side, content in (("a", stock), ("b", lines)):
                (Path(folder) / side / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / side / name).write_text("".join(f"{line}\n" for line in content))
        command = ["git", "diff", "--no-index", "--no-prefix", "a", "b"]
        diff = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    files = dict(re.findall(r"^--- a/(\S+)\n((?:(?!^diff ).*\n)*)", diff, flags=re.MULTILINE))
    order = re.findall(r"megatron/\S+\.py", TEMPLATE.read_text())
    return "".join(f"--- a/{name}\n{files[name]}" for name in order if name in files)


def _chosen(text: str, number: int) -> str:
    """Return ``text`` with the given one of the words of each pair of braces with a bar."""
    return re.sub(r"\{(\w+) \| (\w+)\}", lambda match: match[1 + number], text)


def _with_hunk(lines: list[str], name: str, scope: str, hunk: list[str]) -> list[str]:
    """Return ``lines`` with those that ``hunk`` adds, below the line that starts with ``scope``."""
    context, first = [line[1:] for line in hunk if line.startswith(" ")], hunk.index(next(filter(_is_added, hunk)))
    start = next((number for number, line in enumerate(lines) if line.startswith(scope)), len(lines))
    for number in range(start, len(lines)):
        if lines[number : number + len(context)] == context:
            added = [line[1:] for line in hunk if _is_added(line)]
            return [*lines[: number + first], *added, *lines[number + first :]]
    raise TreeError(f"{name} must have the lines of the template below {scope!r}, got others.")


def _is_added(line: str) -> bool:
    return line.startswith("+")


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
    parser.add_argument("action", choices=("check", "apply", "revert", "make"))
    parser.add_argument("tree", type=Path, help="folder that holds megatron/")
    options = parser.parse_args(arguments)
    try:
        if shutil.which("git") is None:
            raise TreeError("git must be on PATH, got none. Install git.")
        if not (options.tree / "megatron" / "core").is_dir():
            raise TreeError(f"TREE must be a folder that holds megatron/core, got {options.tree}.")
        if options.action == "make":
            print(make(options.tree.resolve()), end="")
            return 0
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
    """Return ``file:line`` of each hunk that ``git apply --reject --verbose`` reports as failed."""
    return (match.group(1) for match in re.finditer(r"^error: patch failed: (\S+:\d+)$", report, re.MULTILINE))


def _uncommitted(tree: Path, files: list[str]) -> list[str]:
    """Return those of ``files`` that are changed in git; none where the tree is not in git."""
    run = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", *files],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    return [line[3:] for line in run.stdout.splitlines()] if run.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
