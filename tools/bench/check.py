"""Check of a baseline in float64, on some rows of the problem itself and with gradients on a smaller one.

The rule is the project's own (megatron_mtraining/testing/error_budget.py): an error may be twice as large as that of
the plain way of computing the same thing in the dtype of the inputs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    assert_within_budget,
    gradient_rounding,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import oracle_attention
from megatron_mtraining.types import VerticalSlashIndex

from .indices import BLOCK, IndexShape, dense_index, synthetic_index
from .problem import Inputs, Problem
from .registry import Baseline, Bound

SAMPLED_ROWS = 32
GRADIENT_TOKENS = {"cuda": 1024, "cpu": 256}
"""Tokens of the smaller problem on which gradients are checked; the exact result makes every score."""

ATTENTION_RESULTS = ("out", "grad_query", "grad_key", "grad_value")


class Standard:
    """Right results for one index, and the error of the plain way; each is computed once, when first asked for.

    The smaller problem has an index of its own, sparse in every part, unless ``index`` is None: then all is dense.
    """

    def __init__(self, problem: Problem, inputs: Inputs, index: VerticalSlashIndex | None) -> None:
        self.inputs = inputs
        self.index = dense_index(problem) if index is None else index
        self.rows = sampled_rows(problem)
        self.small = replace(problem, seq_len=min(problem.seq_len, GRADIENT_TOKENS[problem.device.type]))
        self.small_index = dense_index(self.small) if index is None else synthetic_index(self.small, self._small_shape)

    @property
    def _small_shape(self) -> IndexShape:
        seq_len = self.small.seq_len
        num_blocks = -(-seq_len // BLOCK)
        return IndexShape(distances=1 + num_blocks // 4, local=1, verticals=seq_len // 8, sinks=seq_len // 64)

    @cached_property
    def exact_rows(self) -> Tensor:
        """``out`` at the sampled rows in float64."""
        return rows_of_attention(self.inputs, self.index, self.rows, torch.float64)

    @cached_property
    def plain_rows(self) -> Tensor:
        """``out`` at the sampled rows, every step in the inputs' dtype."""
        return rows_of_attention(self.inputs, self.index, self.rows, self.inputs.query.dtype)

    @cached_property
    def small_inputs(self) -> Inputs:
        """Tensors of the smaller problem."""
        return self.small.inputs()

    @cached_property
    def exact_gradients(self) -> dict[str, Tensor]:
        """``out`` and the gradients of the smaller problem, in float64."""
        return self._gradients(oracle_attention, torch.float64)

    @cached_property
    def plain_gradients(self) -> dict[str, Tensor]:
        """The same, every step in the inputs' dtype."""
        return self._gradients(plain_attention, self.inputs.query.dtype)

    def _gradients(self, attention: object, dtype: torch.dtype) -> dict[str, Tensor]:
        given = self.small_inputs
        run = partial(attention, index=self.small_index, softmax_scale=self.small.softmax_scale)
        tensors = (tensor.to(dtype) for tensor in (given.query, given.key, given.value))
        return run_with_gradients(run, *tensors, grad_out=given.grad_out)


def check_forward(bound: Bound, standard: Standard) -> None:
    """Raise AssertionError unless ``out`` is right at the sampled rows of the problem."""
    with torch.no_grad():
        out = bound.attend(*bound.leaves)
    expected = standard.inputs.query
    assert out.shape == expected.shape, f"out must have shape {tuple(expected.shape)}, got {tuple(out.shape)}."
    assert out.dtype == expected.dtype, f"out must be {expected.dtype}, got {out.dtype}."
    assert_within_budget(out[:, standard.rows], standard.plain_rows, standard.exact_rows, name="out")


def check_gradients(baseline: Baseline, standard: Standard) -> None:
    """Raise AssertionError unless ``out`` and all gradients of the smaller problem are right."""
    given = standard.small_inputs
    bound = baseline.bind(standard.small, given, standard.small_index)
    leaves = [tensor.detach().requires_grad_() for tensor in bound.leaves]
    out = bound.attend(*leaves)
    grads = torch.autograd.grad(out, leaves, given.grad_out)
    shared = (shared_over_group(grad, standard.small.num_kv_heads) for grad in grads[1:])
    ours = dict(zip(ATTENTION_RESULTS, (out.detach(), grads[0], *shared), strict=True))
    rounding = gradient_rounding(
        given.query, given.key, given.value, grad_out=given.grad_out, softmax_scale=standard.small.softmax_scale
    )
    assert_all_within_budget(ours, standard.plain_gradients, standard.exact_gradients, rounding=rounding)


def shared_over_group(grad: Tensor, num_kv_heads: int) -> Tensor:
    """Return the gradient of shared key/value heads from that of heads repeated per query head, or of shared ones."""
    if grad.shape[2] == num_kv_heads:
        return grad
    return grad.unflatten(2, (num_kv_heads, -1)).float().sum(3).to(grad.dtype)


def sampled_rows(problem: Problem) -> Tensor:
    """Return int64, ascending: the first and last rows, those at edges of blocks, and random ones between."""
    generator = torch.Generator().manual_seed(problem.seed + 2)
    edges = [0, 1, 63, 64, 127, 128, problem.seq_len - 65, problem.seq_len - 64, problem.seq_len - 1]
    random = torch.randint(problem.seq_len, (SAMPLED_ROWS - len(edges),), generator=generator)
    rows = torch.cat([torch.tensor(edges).clamp(0, problem.seq_len - 1), random]).unique()
    return rows.to(problem.device)


def rows_of_attention(inputs: Inputs, index: VerticalSlashIndex, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``out`` of some query rows ``[batch, rows, num_heads, head_dim]``, every step in ``dtype``."""
    batch, seq_len, num_heads, head_dim = inputs.query.shape
    group = num_heads // inputs.key.shape[2]
    share = num_heads // index.num_lists
    out = torch.empty(batch, len(rows), num_heads, head_dim, dtype=dtype, device=rows.device)
    for row in range(batch):
        for head in range(num_heads):
            key, value = (tensor[row, :, head // group].to(dtype) for tensor in (inputs.key, inputs.value))
            scores = inputs.query[row, rows, head].to(dtype) @ key.T * head_dim**-0.5
            scores = scores.masked_fill(~selected_keys(index, row, head // share, rows, seq_len), -torch.inf)
            out[row, :, head] = scores.softmax(-1) @ value
    return out


def selected_keys(index: VerticalSlashIndex, row: int, number: int, rows: Tensor, seq_len: int) -> Tensor:
    """Return bool ``[rows, seq]``: keys that the query rows see by one list, read off the definition."""
    position = torch.arange(seq_len, device=rows.device)
    vertical = index.vertical[row, number, : index.num_vertical[row, number]].long()
    slash = index.slash[row, number, : index.num_slash[row, number]].long()
    distance = rows[:, None] // index.block_size - position // index.block_size
    selected = torch.isin(position, vertical) | torch.isin(distance, slash)
    return selected & (position <= rows[:, None])
