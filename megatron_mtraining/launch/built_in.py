"""Functions that a Megatron-LM tree with the source patch calls where the launcher would wrap it from outside.

Each call may come twice, so the launcher runs a patched tree as it does a stock one. See patches/README.md.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from ..arguments import add_arguments
from ..megatron import hooks
from ..megatron.hooks import count_step
from ..megatron.runtime import process

__all__ = ["add_flags", "choose", "count_step", "sparse_spec"]


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags ``--mtraining-*`` to Megatron's parser and return it."""
    return add_arguments(parser, defaults=process().defaults())


def choose(args: Namespace) -> None:
    """Check Megatron's validated arguments, which choose this backend, and record them for the hooks.

    Raises:
        UsageError: a flag's value out of its range, or unsupported flags.
    """
    hooks.choose(args, hooks.extend_attention_backend())


def sparse_spec(spec: Any, name: str) -> Any:
    """Return the layer spec of a model about to be built, with this attention. A collective over all ranks, at first.

    Args:
        spec: a layer or block spec, or None.
        name: of ``spec``, for the printed sentence about the replacement.

    Raises:
        ValueError: layers without a causal self attention, or a configuration that this process cannot run.
    """
    hooks.install_generation_hook(process().hooks, hooks.extend_attention_backend())
    hooks.ensure_runtime()
    return hooks.sparse_spec(spec, name)
