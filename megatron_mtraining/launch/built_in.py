"""Functions that a Megatron-LM tree with the source patch calls where the launcher would wrap it from outside.

Each call may come twice, so the launcher runs a patched tree as it does a stock one. See patches/README.md.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from ..arguments import add_arguments
from ..megatron.patching import Patches
from . import hooks
from .report import SETTINGS

_PATCHES = Patches()
"""Wrappers for which no source patch is needed."""


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags ``--mtraining-*`` to Megatron's parser and return it."""
    return add_arguments(parser, defaults=SETTINGS.defaults())


def choose(args: Namespace) -> None:
    """Check Megatron's validated arguments, which choose this backend, and keep them for what follows.

    Raises:
        UsageError: a flag's value out of its range, or flags that do not go together.
    """
    hooks.choose(args, hooks.extend_attention_backend())


def sparse_spec(spec: Any, name: str) -> Any:
    """Return the layer spec of a model about to be built, with this attention. A collective over all ranks, at first.

    Args:
        spec: a layer or block spec, or None.
        name: what to call it in the sentence that says what was replaced.

    Raises:
        ValueError: layers without a causal self attention, or a configuration that this process cannot run.
    """
    hooks.install_generation_hook(_PATCHES, hooks.extend_attention_backend())
    hooks.ensure_runtime()
    return hooks.sparse_spec(spec, name)


def count_step(iteration: int | None) -> None:
    """Record how many training steps are done, before a step or an evaluation."""
    hooks.count_step(iteration)
