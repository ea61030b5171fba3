"""First lines of docstrings: an imperative verb phrase for what acts, a noun phrase for what is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sources import PACKAGE, ROOT

QUESTIONS = frozenset("Are Called Does Has How Is Says That What When Where Whether Which Who Whom Whose Why".split())
"""First words of a question, or of a clause without its noun: ``True if ...`` or ``Return whether ...`` instead."""

THIRD_PERSON = frozenset(
    """
    Accepts Adds Allocates Answers Applies Assembles Asserts Attends Begins Binds Builds Chooses Closes Collects
    Compares Computes Connects Continues Converts Copies Creates Cuts Decides Empties Fills Finds Follows Gathers
    Generates Gives Hands Holds Installs Joins Keeps Lengthens Lets Logs Looks Makes Merges Opens Parses Predicts
    Prepares Prints Publishes Puts Raises Reduces Refuses Registers Removes Replaces Resolves Restores Returns Rotates
    Selects Sends Summarises Takes Tells Tries Undoes Unpacks Unwinds Validates Waits Wakes Wraps Yields
    """.split()
)
"""Verbs of a sentence about the function: the imperative instead."""

VERB_OR_NOUN = frozenset(
    """
    Calls Checks Counts Draws Ends Exchanges Guards Lists Loads Marks Measures Moves Names Notes Packs Patches Posts
    Reads Records Repeats Replays Reports Runs Sets Splits Starts Stops Sums Times Traces Turns Writes
    """.split()
)
"""Third-person verbs that are plural nouns too: a noun is followed by no object."""

OBJECTS = frozenset("a all an any both each every it its no nothing one some the them these this those what".split())
"""First words of a verb's object, beside what stands in backquotes and roles."""


def documented(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring of ``source``, and of each string under a field."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        before: ast.stmt | None = None
        for statement in node.body:
            is_field = isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(node, (ast.Module, ast.ClassDef))
            is_string = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if (before is None or is_field) and is_string and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value
            before = statement


def is_offender(text: str) -> bool:
    """True if the first line of a docstring is a question, or a sentence in the third person."""
    line = text.strip().partition("\n")[0]
    first, _, rest = line.partition(" ")
    first, second = first.rstrip(",:;."), rest.partition(" ")[0]
    if line.endswith("?") or first in QUESTIONS | THIRD_PERSON:
        return True
    return first in VERB_OR_NOUN and (second.lower() in OBJECTS or second.startswith(("``", ":")))


def offenders(source: str) -> list[str]:
    return [f"{line}: {text.strip().splitlines()[0]}" for line, text in documented(source) if is_offender(text)]


@pytest.mark.parametrize("folder", [PACKAGE, ROOT / "tools"], ids=lambda folder: folder.name)
def test_first_lines_are_imperatives_or_noun_phrases(folder: Path):
    paths = sorted(folder.rglob("*.py"))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in offenders(path.read_text())]
    assert not found, "\n".join(found)


PLANTED = '''
"""HOW WELL it does."""
class Index:
    """Which keys each head keeps."""

    rows: int
    """How many rows it has."""

    @property
    def is_short(self):
        """Whether every document is short."""

    def check(self):
        """Refuses what is no index.

        Raises:
            ValueError: it is none.
        """

    async def count(self):
        """Counts the pairs."""

    def is_causal(self):
        """Is the key causal?"""

LIMIT = 1
"""What a call may take."""
'''


def test_planted_offenders_are_found():
    first_words = [line.split()[1] for line in offenders(PLANTED)]
    assert sorted(first_words) == ["Counts", "How", "Is", "Refuses", "What", "Whether", "Which"]


@pytest.mark.parametrize(
    "line",
    [
        "Return the kept pairs of each head.",
        "Kept pairs of each head, ``[batch, heads]``.",
        "True if every document is short.",
        "Runs of columns of each list.",
        "Calls whose indices are counted together.",
        "Sums that travel around a ring.",
        "int64 ``[rows]``: pairs of each row.",
    ],
)
def test_imperatives_and_nouns_pass(line: str):
    assert not offenders(f'"""{line}"""')
