"""Drawn problems in drawn rings: out, lse and every gradient against the oracle, by the error rule.

The draws are the same in every run. ``--hypothesis-profile soak`` draws many more, each time others; a failure ends
with the smallest problem that still fails.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from megatron_mtraining import select
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.testing.error_budget import assert_all_within_budget, gradient_rounding, plain_attention
from megatron_mtraining.testing.simulator import RankSimulator
from tests.draws import (
    SEEDS,
    Ring,
    block_list_configs,
    examples,
    index_of_kinds,
    kinds_of_lists,
    packs,
    rings,
    spans_of,
    vertical_slash_configs,
)
from tests.unit.metrics_cases import with_garbage

from .cases import Problem, join, solve_local_part, solve_on_one_device

LOW = (torch.float32, torch.bfloat16, torch.float16)
SCALES = ((None, 1.0), (None, 3.0), (0.01, 6.0), (1.0, 1.0), (0.3, 0.02))
"""Softmax scales and magnitudes of queries and keys."""


class Sizes(NamedTuple):
    """Everything about a problem but its numbers."""

    ring: Ring
    heads: tuple[int, int, int]
    """Of queries, of keys, and lists."""

    batch: int
    cuts: tuple[int, ...] | None
    head_dim: int
    softmax_scale: float | None
    magnitude: float
    kinds: list[tuple[str, str]]
    has_garbage: bool
    """Whether lists go on behind their counts, with entries that nobody may read."""

    def problem(self, seed: int) -> Problem:
        """Tensors and lists of that seed, in float64."""
        random.seed(seed)
        torch.manual_seed(seed)
        layout, (num_heads, num_kv_heads, num_lists) = self.ring.layout, self.heads
        shape = (self.batch, layout.seq_len, num_heads, self.head_dim)
        kv_shape = (*shape[:2], num_kv_heads, self.head_dim)
        spans = spans_of(self.cuts, batch=self.batch, seq_len=layout.seq_len)
        sizes = {"seq_len": layout.seq_len, "block_size": layout.block_size, "stride": layout.cp_size}
        index = index_of_kinds(self.kinds, spans, num_lists, **sizes)
        return Problem(
            self.magnitude * torch.randn(shape, dtype=torch.float64),
            self.magnitude * torch.randn(kv_shape, dtype=torch.float64),
            torch.randn(kv_shape, dtype=torch.float64),
            torch.randn(shape, dtype=torch.float64),
            torch.randn(shape[0], num_heads, shape[1], dtype=torch.float64),
            with_garbage(index) if self.has_garbage else index,
            None if self.cuts is None else torch.tensor(self.cuts, dtype=torch.int32),
        )


@st.composite
def problems(draw: Callable) -> Sizes:
    ring = draw(rings())
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cuts = draw(packs(ring.layout.seq_len, ring.layout.block_size))
    softmax_scale, magnitude = draw(st.sampled_from(SCALES))
    return Sizes(
        ring=ring,
        heads=(num_kv_heads * group, num_kv_heads, num_kv_heads * draw(st.sampled_from([1, group]))),
        batch=draw(st.integers(1, 3)) if cuts is None else 1,
        cuts=cuts,
        head_dim=draw(st.sampled_from([8, 1, 3, 5, 16])),
        softmax_scale=softmax_scale,
        magnitude=magnitude,
        kinds=draw(kinds_of_lists),
        has_garbage=draw(st.booleans()),
    )


def solve(problem: Problem, ring: Ring, **options) -> dict[str, Tensor]:
    def body(group):
        groups = group if ring.inner_size is None else group.ring_groups(ring.inner_size)
        return solve_local_part(problem, ring.layout, groups, schedule=ring.schedule, **options)

    return join(RankSimulator(ring.layout.cp_size, timeout=300.0).run(body), ring.layout)


def assert_exact(got: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    for name, ours in got.items():
        bound = 1e-10 * max(1.0, float(exact[name].nan_to_num(neginf=0.0).abs().max()))
        torch.testing.assert_close(ours, exact[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@given(seed=SEEDS, sizes=problems())
@examples(12)
def test_float64(seed, sizes):
    problem = sizes.problem(seed)
    got = solve(problem, sizes.ring, softmax_scale=sizes.softmax_scale)
    assert_exact(got, solve_on_one_device(problem, softmax_scale=sizes.softmax_scale))


@given(seed=SEEDS, sizes=problems(), dtype=st.sampled_from(LOW))
@examples(10)
def test_low_precision(seed, sizes, dtype):
    problem = sizes.problem(seed).to(dtype)
    scale = {"softmax_scale": sizes.softmax_scale}
    ours = solve(problem, sizes.ring, **scale)
    plain = solve_on_one_device(problem, plain_attention, **scale)
    exact = solve_on_one_device(problem.to(torch.float64), **scale)
    assert_all_within_budget(ours, plain, exact, rounding=exponent_rounding(problem, exact, sizes))


def exponent_rounding(problem: Problem, exact: dict[str, Tensor], sizes: Sizes) -> dict[str, float]:
    """What float32 can put into results through exponents: each step, and a backward, rounds scores and ``lse``.

    A weight ``exp(score - lse)`` is then off by as much of itself. The plain way forms no weight from ``lse`` and has
    no steps, so with few tokens its error is no measure of that.
    """
    scale = problem.query.shape[-1] ** -0.5 if sizes.softmax_scale is None else sizes.softmax_scale
    norms = (float(tensor.double().norm(dim=-1).max()) for tensor in problem[:2])
    largest = max(scale * math.prod(norms), float(exact["lse"].abs().max()))
    epsilons = (sizes.ring.layout.cp_size + 2) * largest
    in_weights = epsilons * torch.finfo(torch.float32).eps
    in_scores = gradient_rounding(*problem[:3], grad_out=problem.grad_out, softmax_scale=scale)
    return {
        "lse": in_weights,
        **{name: in_weights * float(exact[name].abs().max()) for name in ("out", "grad_value")},
        **{name: (1.0 + epsilons) * rounding for name, rounding in in_scores.items()},
    }


@st.composite
def selections(draw: Callable) -> tuple[Sizes, MTrainingConfig]:
    """Problems with a configuration of any pattern for their blocks."""
    sizes = draw(problems())
    size = sizes.ring.layout.block_size
    dense = MTrainingConfig(pattern="dense", block_size=size)
    return sizes, draw(block_list_configs(size) | vertical_slash_configs(size) | st.just(dense))


@given(seed=SEEDS, drawn=selections())
@examples(10)
def test_a_layer(seed, drawn):
    """As a layer does it: keys set off while each rank selects."""
    sizes, config = drawn
    problem, scale = sizes.problem(seed), {"softmax_scale": sizes.softmax_scale}
    index = select(problem.query, problem.key, config, cu_seqlens=problem.cu_seqlens, **scale)
    got = solve(problem, sizes.ring, config=config, **scale)
    assert_exact(got, solve_on_one_device(problem._replace(index=index), **scale))
