"""Attention on the CUDA kernels on drawn problems, judged by the error rule as those of the covering matrix are.

The draws are the same in every run. ``--hypothesis-profile soak`` draws many more, each time others; a failure ends
with the smallest problem that still fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from .cases import BLOCK, Case
from .ring_checks import check_ring
from .test_cuda_attention import check
from .test_cuda_block_lists import check as check_lists
from .test_cuda_block_lists import random_lists

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

# The fixture chooses the kernels, of which a draw changes nothing.
on_one_family = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

LAYOUTS = ("contiguous", "zigzag", "striped", "rotated")

SCALES = ((None, 1.0), (None, 3.0), (0.01, 6.0), (1.0, 1.0), (0.3, 0.02))
"""Softmax scales and magnitudes: scores up to some 100, for the float32 rounding of which the bound of ``lse`` is."""

SEEDS = st.integers(0, 2**16)


@st.composite
def cases(draw: Callable, *, multiple: int = 1) -> Case:
    """Problems of 64 to 1500 tokens, a multiple of ``multiple``. On fewer the plain way may be exact by chance."""
    num_kv_heads = draw(st.integers(1, 3))
    seq_len = multiple * draw(st.integers(-(-BLOCK // multiple), 1500 // multiple))
    softmax_scale, magnitude = draw(st.sampled_from(SCALES))
    cuts = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=10).map(sorted))
    return Case(
        seq_len=seq_len,
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([64, 96, 128])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        batch=draw(st.integers(1, 3)) if cuts is None else 1,
        bounds=None if cuts is None else (0, *cuts, seq_len),
        max_vertical=draw(st.none() | st.integers(0, min(seq_len, 400))),
        max_slash=draw(st.none() | st.integers(0, 8)),
        softmax_scale=softmax_scale,
        magnitude=magnitude,
        shares_lists=draw(st.booleans()),
    )


@st.composite
def rings(draw: Callable) -> tuple[Case, str, int, int]:
    """A problem, its layout, number of ranks, and the ranks whose keys one step takes."""
    kind, cp_size = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 6))
    case = draw(cases(multiple=cp_size * BLOCK * (2 if kind == "zigzag" else 1)))
    return case, kind, cp_size, draw(st.integers(1, cp_size))


def start(seed: int) -> None:
    """Seeds lists and tensors."""
    random.seed(seed)
    torch.manual_seed(seed)


@given(seed=SEEDS, case=cases())
@on_one_family
def test_one_device(seed, case):
    start(seed)
    check(case, case.index())


@given(seed=SEEDS, ring=rings())
@on_one_family
def test_rank_by_rank(seed, ring):
    start(seed)
    case, kind, cp_size, sources_together = ring
    check_ring(case, case.index(), kind, cp_size, sources_together=sources_together)


@given(seed=SEEDS, case=cases(), chunk_blocks=st.integers(1, 5), masks=st.booleans())
@on_one_family
def test_block_lists(seed, case, chunk_blocks, masks):
    start(seed)
    num_lists = case.num_kv_heads if case.shares_lists else case.num_heads
    check_lists(case, random_lists(case, num_lists, chunk_blocks, masks))
