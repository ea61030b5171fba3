"""This package's attention: each kernel family, and the reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from megatron_mtraining import MTrainingConfig, sparse_attention
from megatron_mtraining.backends import cuda
from megatron_mtraining.types import VerticalSlashIndex

from ..indices import BLOCK
from ..problem import Inputs, Problem
from ..registry import Baseline, Bound, register
from .issued import issued_pairs_of_tiles

REFERENCE_PAIRS = 1 << 24
"""Tokens squared up to which the reference runs: it is there to be right."""

FAMILY_VARIABLE = "MTRAINING_KERNELS"


@contextmanager
def kernel_family(family: str | None) -> Iterator[None]:
    """Have the CUDA backend take the kernels of ``family``; a call's backward takes those of its forward."""
    before = os.environ.get(FAMILY_VARIABLE)
    if family is not None:
        os.environ[FAMILY_VARIABLE] = family
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(FAMILY_VARIABLE, None)
        else:
            os.environ[FAMILY_VARIABLE] = before


def _bind(
    problem: Problem, inputs: Inputs, index: VerticalSlashIndex, *, backend: str, family: str | None = None
) -> Bound:
    config = MTrainingConfig(backend=backend, block_size=index.block_size)
    options = {"index": index, "softmax_scale": problem.softmax_scale}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with kernel_family(family):
            return sparse_attention(query, key, value, config, **options).out

    issued = (
        issued_pairs_of_tiles(index.per_head(problem.num_heads), seq_len=problem.seq_len) if backend == "cuda" else None
    )
    return Bound(attend=attend, leaves=(inputs.query, inputs.key, inputs.value), issued_pairs=issued)


def kernels_unavailable(problem: Problem, family: str) -> str | None:
    """Return why the kernels of ``family`` cannot compute ``problem``, or None."""
    why = cuda.why_unavailable(device=problem.device, dtype=problem.dtype, head_dim=problem.head_dim, block_size=BLOCK)
    if why is not None:
        return why
    from megatron_mtraining.backends.cuda.operators import families  # loads the compiled module

    available = families(problem.device)
    return None if family in available else f"It is not built, or not for this GPU; there is {', '.join(available)}."


def _reference_unavailable(problem: Problem) -> str | None:
    longest = int(REFERENCE_PAIRS**0.5)
    return f"It takes part up to {longest} tokens." if problem.seq_len > longest else None


for _family in ("sm90", "sm80"):
    register(
        Baseline(
            name=f"mtraining-{_family}",
            is_dense=False,
            is_ours=True,
            bind=partial(_bind, backend="cuda", family=_family),
            unavailable=partial(kernels_unavailable, family=_family),
        )
    )
register(
    Baseline(
        name="mtraining-reference",
        is_dense=False,
        is_ours=True,
        bind=partial(_bind, backend="reference"),
        unavailable=_reference_unavailable,
    )
)
