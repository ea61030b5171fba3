"""Error that ends an examination before it begins, and the quotation of other errors."""

from __future__ import annotations

import textwrap

_LONGEST = 400
"""Characters of an error that are quoted; the traceback above has all."""


class CannotStartError(ValueError):
    """Error for an examination that cannot begin here or under these flags; the message has the remedy."""


def quoted(error: Exception) -> str:
    """Return an error as part of a sentence: its type and its message, shortened."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {textwrap.shorten(text, _LONGEST)}"
