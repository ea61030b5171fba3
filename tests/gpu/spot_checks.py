"""Single rows and keys of a long sequence in float64: the judge where a mask of the whole sequence does not fit.

Rows are computed from nothing but the inputs. The gradients of a key need lse and out of every row that sees it: those
of the result under test, which are checked at the rows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, sparse_attention
from megatron_mtraining.testing.error_budget import assert_within_budget, run_with_gradients


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs on the GPU, batch 1, without documents; any strides."""

    query: Tensor  # [1, S, Hq, D]
    key: Tensor  # [1, S, Hkv, D]
    value: Tensor
    grad_out: Tensor  # [1, S, Hq, D]
    index: VerticalSlashIndex

    @property
    def seq_len(self) -> int:
        return self.query.shape[1]

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.query.shape[2] // self.key.shape[2]

    @property
    def scale(self) -> float:
        return self.query.shape[3] ** -0.5

    def lists(self, head: int) -> tuple[Tensor, Tensor]:
        """Verticals and distances of a head, int64."""
        vertical, slash = (
            table[0, head, : int(count[0, head])].long()
            for table, count in (
                (self.index.vertical, self.index.num_vertical),
                (self.index.slash, self.index.num_slash),
            )
        )
        return vertical, slash

    def visible_keys(self, head: int, row: int) -> Tensor:
        """Positions that a row attends to, ascending."""
        vertical, slash = self.lists(head)
        return _tokens(row // 64 - slash, vertical, first=0, end=row + 1)

    def seeing_rows(self, head: int, token: int) -> Tensor:
        """Rows that attend to a key, ascending."""
        vertical, slash = self.lists(head)
        if bool((vertical == token).any()):
            return torch.arange(token, self.seq_len, device=self.query.device)
        return _tokens(token // 64 + slash, vertical[:0], first=token, end=self.seq_len)


def _tokens(blocks: Tensor, others: Tensor, *, first: int, end: int) -> Tensor:
    """The tokens of some blocks and some others, as far as they are in ``[first, end)``."""
    tokens = (blocks[:, None] * 64 + torch.arange(64, device=blocks.device)).flatten()
    tokens = torch.cat([tokens, others]).unique()
    return tokens[(tokens >= first) & (tokens < end)]


def check(problem: Problem, *, rows: list[int], keys: list[int]) -> None:
    """Runs the CUDA kernels and asserts the error rule at some rows, each with a random head, and at some keys.

    Args:
        problem: the inputs.
        rows: query positions to check ``out``, ``lse`` and ``grad_query`` at.
        keys: key positions to check ``grad_key`` and ``grad_value`` at, for one random key/value head each.
    """
    ours = run_with_gradients(
        lambda q, k, v: sparse_attention(q, k, v, index=problem.index, config=MTrainingConfig(backend="cuda")),
        problem.query,
        problem.key,
        problem.value,
        grad_out=problem.grad_out,
    )
    places = [(row, random.randrange(problem.query.shape[2])) for row in rows]
    exact, plain = ([_row(problem, *place, dtype) for place in places] for dtype in (torch.float64, None))
    for number, name in enumerate(("out", "grad_query")):
        got = torch.stack([ours[name][0, row, head] for row, head in places])
        low, right = (torch.stack([result[number] for result in results]) for results in (plain, exact))
        assert_within_budget(got, low, right, name=name)
    lse = torch.stack([ours["lse"][0, head, row] for row, head in places])
    torch.testing.assert_close(lse.double(), torch.stack([result[2] for result in exact]), rtol=2e-6, atol=2e-5)

    places = [(key, random.randrange(problem.key.shape[2])) for key in keys]
    exact, plain = ([_key(problem, ours, *place, dtype) for place in places] for dtype in (torch.float64, None))
    for number, name in enumerate(("grad_key", "grad_value")):
        got = torch.stack([ours[name][0, key, head] for key, head in places])
        low, right = (torch.stack([result[number] for result in results]) for results in (plain, exact))
        assert_within_budget(got, low, right, name=name)


def _row(problem: Problem, row: int, head: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``grad_query`` and ``lse`` of one row; ``dtype`` None is the plain way in the dtype of the inputs."""
    keys, kv_head = problem.visible_keys(head, row), head // problem.group
    dtype = dtype or problem.query.dtype
    query = problem.query[0, row, head].to(dtype).detach().requires_grad_()
    key, value = (tensor[0, keys, kv_head].to(dtype) for tensor in (problem.key, problem.value))
    scores = (key @ query) * problem.scale
    out = torch.softmax(scores, 0) @ value
    (grad_query,) = torch.autograd.grad(out, query, problem.grad_out[0, row, head].to(dtype))
    return out.detach(), grad_query, torch.logsumexp(scores, 0).detach()


def _key(
    problem: Problem, ours: dict[str, Tensor], token: int, kv_head: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """``grad_key`` and ``grad_value`` of one key, summed over its group's heads; ``dtype`` as in :func:`_row`."""
    low = dtype or problem.query.dtype
    key, value = (tensor[0, token, kv_head].to(low) for tensor in (problem.key, problem.value))
    sums = [torch.zeros_like(key, dtype=dtype or torch.float32) for _ in range(2)]
    for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
        rows = problem.seeing_rows(head, token)
        query, grad_out = (tensor[0, rows, head].to(low) for tensor in (problem.query, problem.grad_out))
        out = ours["out"][0, rows, head].to(dtype or torch.float32)
        wide = sums[0].dtype  # the softmax itself is computed wide, in either way
        lse, delta = ours["lse"][0, head, rows].to(wide), (grad_out.to(wide) * out).sum(-1)
        share = torch.exp(((query @ key) * problem.scale).to(wide) - lse).to(low)
        grad_score = (share.to(wide) * ((grad_out @ value).to(wide) - delta)).to(low)
        sums[0] += (grad_score @ query).to(wide) * problem.scale
        sums[1] += (share @ grad_out).to(wide)
    return sums[0].to(low), sums[1].to(low)
