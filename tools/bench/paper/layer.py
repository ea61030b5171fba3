"""One rank's attention layer under each method: selection, forward and backward on its part of a whole sequence."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mtraining import SequenceLayout, select, shard_sequence, sparse_attention
from megatron_mtraining.backends.protocol import AttentionBackend
from megatron_mtraining.backends.resolve import resolve_backend
from megatron_mtraining.errors import BackendUnavailableError
from megatron_mtraining.ring import RingAttention, RingContext, post_kv, ring_schedule
from megatron_mtraining.transport import RingGroups, RingTransports, create_ring_groups, resolve_transports
from megatron_mtraining.types import AttentionIndex
from tools.synthetic_layer import synthetic_layer

from ..problem import Inputs, Problem
from .methods import Method


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Place of a rank."""

    rank: int
    world_size: int
    node_size: int
    device: torch.device
    groups: RingGroups
    """Groups of the ring."""

    @classmethod
    def create(cls, *, node_size: int, device: torch.device) -> ParallelState:
        """Create the groups of all ranks of the job, which are one context-parallel group. A collective."""
        groups = create_ring_groups([list(range(dist.get_world_size()))], inner_size=node_size)
        sizes = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "node_size": node_size}
        return cls(**sizes, device=device, groups=groups)

    def transports(self, schedule: str) -> RingTransports:
        """Return the transports of a schedule."""
        return resolve_transports(self.groups, schedule)


def whole_inputs(problem: Problem) -> Inputs:
    """Draw random tensors with planted structure (``tools/synthetic_layer.py``), the same on every rank.

    Where every key is as likely as every other, what a method keeps says nothing.
    """
    generator = torch.Generator(problem.device).manual_seed(problem.seed)
    sample = synthetic_layer(
        seq_len=problem.seq_len,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        generator=generator,
    )
    query, key = (tensor.to(problem.dtype).contiguous() for tensor in (sample.query, sample.key))
    options = {"generator": generator, "device": problem.device, "dtype": problem.dtype}
    value, grad_out = (torch.randn(like.shape, **options) for like in (key, query))
    return Inputs(query=query, key=key, value=value, grad_out=grad_out)


class Layer(Protocol):
    """One rank's layer."""

    layout: SequenceLayout
    leaves: tuple[Tensor, Tensor, Tensor]
    """This rank's query, key and value."""

    grad_out: Tensor

    def select(self) -> AttentionIndex | None:
        """Select what a method keeps; None for one that keeps all without a list."""
        ...

    def attend(self, index: AttentionIndex | None) -> Tensor:
        """Compute this rank's ``out``, differentiable in ``leaves``."""
        ...


class RingLayer:
    """A method of this package."""

    def __init__(self, method: Method, problem: Problem, whole: Inputs, parallel: ParallelState) -> None:
        self._config, self._parallel = method.config, parallel
        self._attend_config = replace(method.config, backend=backend_name(parallel.device))
        self.layout = SequenceLayout(
            method.layout, seq_len=problem.seq_len, cp_size=parallel.world_size, node_size=parallel.node_size
        )
        self.leaves, self.grad_out = own_part(whole, self.layout, parallel)

    def select(self) -> AttentionIndex:
        """Select as :class:`Layer` says."""
        query, key, _ = self.leaves
        return select(query, key, self._config, layout=self.layout, groups=dist.group.WORLD)

    def attend(self, index: AttentionIndex | None) -> Tensor:
        """Attend as :class:`Layer` says."""
        options = {"index": index, "layout": self.layout, "groups": self._parallel.groups}
        return sparse_attention(*self.leaves, self._attend_config, **options).out

    def backend(self) -> AttentionBackend:
        """Return the backend that computes its steps."""
        return backend_for(self.leaves[0])

    def attend_on(self, backend: AttentionBackend, index: AttentionIndex) -> Tensor:
        """Run :meth:`attend` on a given backend, without the agreement of ranks that precedes a call."""
        schedule, head_dim = self._config.schedule, self.leaves[0].shape[3]
        groups = self._parallel.transports(schedule)
        sizes = {"cp_rank": groups.cp.rank, "cp_size": groups.cp.size, "inner_size": groups.inner.size}
        context = RingContext(
            layout=self.layout,
            documents=None,
            groups=groups,
            schedule=ring_schedule(schedule, **sizes),
            backend=backend,
            softmax_scale=head_dim**-0.5,
        )
        with torch.no_grad():
            posted = post_kv(*self.leaves[1:], context.schedule, groups)
        return RingAttention.apply(*self.leaves, context, posted, index.rebuild, *index.tensors)[0]


class TransformerEngineLayer:
    """TransformerEngine's dense attention, its keys passed from rank to rank (``cp_comm_type`` p2p)."""

    def __init__(self, method: Method, problem: Problem, whole: Inputs, parallel: ParallelState) -> None:
        self.layout = SequenceLayout(method.layout, seq_len=problem.seq_len, cp_size=parallel.world_size)
        self.leaves, self.grad_out = own_part(whole, self.layout, parallel)
        ring = {
            "cp_group": dist.group.WORLD,
            "cp_global_ranks": list(range(parallel.world_size)),
            "cp_stream": torch.cuda.Stream(),
            "cp_comm_type": "p2p",
        }
        self._module = _transformer_engine(problem, **(ring if parallel.world_size > 1 else {}))

    def select(self) -> None:
        """Select as :class:`Layer` says."""

    def attend(self, index: AttentionIndex | None) -> Tensor:
        """Attend as :class:`Layer` says."""
        return self._module(*self.leaves).view(self.leaves[0].shape)


def _transformer_engine(problem: Problem, **ring: Any) -> torch.nn.Module:
    """Return its causal attention."""
    from ..baselines.transformer_engine import causal_attention  # here, since its package imports every baseline

    return causal_attention(problem, **ring)


def own_part(
    whole: Inputs, layout: SequenceLayout, parallel: ParallelState
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return query, key and value of a rank, which record gradients, and its ``grad_out``."""

    def part(tensor: Tensor) -> Tensor:
        return shard_sequence(tensor, layout, cp_rank=parallel.rank, dim=1)

    query, key, value = (part(tensor).requires_grad_() for tensor in (whole.query, whole.key, whole.value))
    return (query, key, value), part(whole.grad_out)


def backend_name(device: torch.device) -> str:
    """Return the name of the kernels on a GPU, where the reference in their place would run for hours."""
    return "cuda" if device.type == "cuda" else "reference"


def backend_for(query: Tensor) -> AttentionBackend:
    """Return the backend that computes on tensors like ``query``."""
    name = backend_name(query.device)
    return resolve_backend(name, device=query.device, dtype=query.dtype, head_dim=query.shape[3], block_size=64)


def layer_of(method: Method, problem: Problem, whole: Inputs, parallel: ParallelState) -> Layer:
    """Return this rank's layer."""
    return (TransformerEngineLayer if method.config is None else RingLayer)(method, problem, whole, parallel)


def check_runs(method: Method, small: Problem) -> None:
    """Try a method on a few tokens of one rank, without a ring.

    Raises:
        BackendUnavailableError: it cannot run here; the sentence says why.
    """
    inputs = small.inputs()
    if method.config is not None:
        index = select(inputs.query, inputs.key, method.config)
        config = replace(method.config, backend=backend_name(small.device))
        sparse_attention(inputs.query, inputs.key, inputs.value, config, index=index)
    elif importlib.util.find_spec("transformer_engine") is None:
        raise BackendUnavailableError("It is not installed (PyPI: transformer-engine[pytorch]).")
    elif small.device.type != "cuda" or small.dtype == torch.float32:
        raise BackendUnavailableError("It needs a GPU, and bf16 or fp16.")
    else:
        try:
            _transformer_engine(small)(inputs.query, inputs.key, inputs.value)
        except (ImportError, OSError, ValueError) as error:  # libraries that do not load; no attention for such inputs
            raise BackendUnavailableError(f"It cannot run here: {error}") from error
