"""One attention problem, solved by the dense oracle on one device and by a ring of simulated ranks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import SequenceLayout, gather_sequence, shard_sequence
from megatron_mtraining.testing.error_budget import run_with_gradients
from megatron_mtraining.testing.oracle import oracle_attention
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import Group, RingGroups, as_ring_groups, as_transport
from megatron_mtraining.types import AttentionIndex, AttentionOutput, VerticalSlashIndex

PARTS = ("out", "lse", "grad_query", "grad_key", "grad_value")
SEQUENCE_DIM = {"out": 1, "lse": 2, "grad_query": 1, "grad_key": 1, "grad_value": 1}


class Problem(NamedTuple):
    """Inputs and output gradients of a whole sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    index: VerticalSlashIndex
    cu_seqlens: Tensor | None

    def to(self, dtype: torch.dtype) -> Problem:
        """The same problem in another dtype; ``grad_lse`` in the one in which lse comes."""
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = (tensor.to(dtype) for tensor in self[:4])
        return Problem(*tensors, self.grad_lse.to(lse_dtype), self.index, self.cu_seqlens)


def random_index(
    rows: int,
    num_heads: int,
    *,
    seq_len: int,
    block_size: int,
    num_vertical: int = 5,
    slashes: Sequence[int] | None = None,
) -> VerticalSlashIndex:
    """Up to ``num_vertical`` columns a head, and the given distances or up to four."""
    num_blocks = -(-seq_len // block_size)

    def distances() -> list[int]:
        if slashes is not None:
            return [0, *slashes]
        return [0, *random.sample(range(1, num_blocks), min(random.randint(0, 3), num_blocks - 1))]

    def columns() -> list[int]:
        return random.sample(range(seq_len), min(random.randint(0, num_vertical), seq_len))

    return VerticalSlashIndex.from_lists(
        [[columns() for _ in range(num_heads)] for _ in range(rows)],
        [[distances() for _ in range(num_heads)] for _ in range(rows)],
        seq_len=seq_len,
        block_size=block_size,
    )


def random_problem(
    seq_len: int,
    *,
    block_size: int,
    heads: tuple[int, int] = (4, 2),
    batch: int = 1,
    bounds: Sequence[int] | None = None,
    head_dim: int = 8,
    num_lists: int | None = None,
    **index_options: Any,
) -> Problem:
    """A float64 problem with random tensors and a random index; ``bounds`` makes it one of packed documents.

    The index has ``num_lists`` lists in a row, by default one for each query head.
    """
    num_heads, num_kv_heads = heads
    query, grad_out = (torch.randn(batch, seq_len, num_heads, head_dim, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(batch, seq_len, num_kv_heads, head_dim, dtype=torch.float64) for _ in range(2))
    rows = batch if bounds is None else len(bounds) - 1
    return Problem(
        query,
        key,
        value,
        grad_out,
        torch.randn(batch, num_heads, seq_len, dtype=torch.float64),
        random_index(rows, num_lists or num_heads, seq_len=seq_len, block_size=block_size, **index_options),
        None if bounds is None else torch.tensor(bounds, dtype=torch.int32),
    )


def solve_on_one_device(
    problem: Problem,
    attention: Callable[..., AttentionOutput] = oracle_attention,
    *,
    softmax_scale: float | None = None,
) -> dict[str, Tensor]:
    """``PARTS`` of the whole sequence."""

    def bound(query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
        options = {"softmax_scale": softmax_scale, "cu_seqlens": problem.cu_seqlens}
        return attention(query, key, value, index=problem.index, **options)

    return run_with_gradients(bound, *problem[:3], grad_out=problem.grad_out, grad_lse=problem.grad_lse)


def solve_on_ranks(
    problem: Problem,
    kind: str,
    cp_size: int,
    *,
    schedule: str = "hierarchical",
    inner_size: int | None = None,
    timeout: float = 120.0,
) -> dict[str, Tensor]:
    """``PARTS`` of the whole sequence, put together from what ``cp_size`` simulated ranks computed."""
    layout = layout_of(problem, kind, cp_size, node_size=inner_size)

    def body(group: Any) -> tuple[Tensor, ...]:
        groups = group if inner_size is None else group.ring_groups(inner_size)
        return solve_local_part(problem, layout, groups, schedule=schedule)

    return join(RankSimulator(cp_size, timeout=timeout).run(body), layout)


def solve_local_part(
    problem: Problem,
    layout: SequenceLayout,
    groups: RingGroups | Group,
    *,
    config: MTrainingConfig | None = None,
    schedule: str = "hierarchical",
    softmax_scale: float | None = None,
) -> tuple[Tensor, ...]:
    """This rank's part of ``PARTS``; with a ``config`` the index is selected in the same call."""
    cp_group = as_ring_groups(groups).cp
    cp_rank = as_transport(cp_group).rank

    def local(tensor: Tensor, dim: int = 1) -> Tensor:
        return shard_sequence(tensor, layout, cp_rank=cp_rank, dim=dim)

    inputs = [local(tensor).requires_grad_() for tensor in problem[:3]]
    call = {"layout": layout, "cu_seqlens": problem.cu_seqlens, "softmax_scale": softmax_scale}
    if config is None:
        call |= {"config": on_schedule(schedule, problem.index), "index": problem.index}
    else:
        call["config"] = dataclasses.replace(config, schedule=schedule)
    result = sparse_attention(*inputs, groups=groups, **call)
    torch.autograd.backward(result, [local(problem.grad_out), local(problem.grad_lse, 2)])
    return *(part.detach() for part in result), *(leaf.grad for leaf in inputs)


def on_schedule(schedule: str, index: AttentionIndex) -> MTrainingConfig:
    """A configuration for calls with a given index."""
    return MTrainingConfig(schedule=schedule, block_size=index.block_size)


def layout_of(problem: Problem, kind: str, cp_size: int, *, node_size: int | None = None) -> SequenceLayout:
    """A layout of the problem's sequence and blocks."""
    seq_len, block_size = problem.query.shape[1], problem.index.block_size
    return SequenceLayout(kind, seq_len=seq_len, cp_size=cp_size, block_size=block_size, node_size=node_size)


def join(parts: Sequence[tuple[Tensor, ...]], layout: SequenceLayout) -> dict[str, Tensor]:
    """Every rank's share of ``PARTS``, in rank order, as the whole sequence's."""
    by_name = zip(PARTS, zip(*parts, strict=True), strict=True)
    return {name: gather_sequence(shares, layout, dim=SEQUENCE_DIM[name]) for name, shares in by_name}


def worst_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The greatest absolute difference over all parts; NaN counts as infinite."""
    return max(float((got[name].double() - want[name]).abs().nan_to_num(torch.inf).max()) for name in PARTS)


def random_bounds(seq_len: int, num_documents: int) -> list[int]:
    """Bounds of packed documents that start anywhere, with an empty one and one of a single token among them."""
    cuts = sorted(random.sample(range(2, seq_len), num_documents - 3))
    return [0, 0, 1, *cuts, seq_len]
