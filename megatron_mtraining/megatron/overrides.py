"""Overrides by which Megatron follows the project's layout wherever it assumes its own zigzag split.

Each place is a function that Megatron calls by name and that other modules have imported by name. :func:`install` puts
the project's own in its place wherever it is bound; :func:`uninstall` puts Megatron's back. What cannot follow the
layout is refused instead (:mod:`.flag_refusals`, :mod:`.refusals`).
"""

from __future__ import annotations

from typing import Any

from ..errors import invalid
from . import batch_split, rope, scan_order, token_roll
from .patching import rebind
from .token_split import TokenSplit

PLACES = (rope, batch_split, token_roll, scan_order)
"""Modules with a function ``replacements(split)``: what each replaces in Megatron, with what."""


class _Installed:
    """The one installation of this process: the split, and what is bound in Megatron with what was."""

    split: TokenSplit | None = None
    pairs: list[tuple[Any, Any]] = []


def install(*, layout: str, block_size: int, node_size: int | None = None) -> None:
    """Make Megatron split sequences by ``layout``; the same call again changes nothing.

    ``zigzag`` keeps Megatron's functions, which are right for it.

    Args:
        layout: a kind of :class:`megatron_mtraining.SequenceLayout`.
        block_size: tokens in a block.
        node_size: context-parallel ranks in a node; ``node_striped`` needs it.

    Raises:
        ValueError: another layout is installed.
        MissingSymbolError: this Megatron-Core lacks a function that is replaced.
    """
    split = TokenSplit(layout, block_size, node_size if layout == "node_striped" else None)
    if layout == "zigzag" or _Installed.split == split:
        return
    if _Installed.split is not None:
        raise invalid(
            "layout",
            f"the installed {_Installed.split}",
            split,
            "Call destroy() before another one.",
        )
    pairs = [pair for place in PLACES for pair in place.replacements(split)]
    rebind(pairs)
    _Installed.split, _Installed.pairs = split, pairs
    rope.forget_tables()


def uninstall() -> None:
    """Bind Megatron's own functions again; do nothing where nothing is installed."""
    if _Installed.split is None:
        return
    rebind((replacement, original) for original, replacement in _Installed.pairs)
    _Installed.split, _Installed.pairs = None, []
    rope.forget_tables()


def replaced() -> list[str]:
    """Return the names of the functions that are replaced now, for a line in a log."""
    return sorted(f"{original.__module__}.{original.__name__}" for original, _ in _Installed.pairs)
