"""Inputs for the tests of CUDA kernels, and attention composed of a backend's operations the way a ring does it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.backends.protocol import AttentionBackend
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.types import AttentionOutput, Documents, VerticalSlashIndex

from ..unit.attention_inputs import random_index

BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the covering matrix."""

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    bounds: tuple[int, ...] | None = None
    """Bounds of packed documents."""
    max_vertical: int | None = None
    """None: an eighth of the sequence."""
    max_slash: int | None = None
    """None: half of the distances."""
    softmax_scale: float | None = None
    magnitude: float = 1.0
    """Standard deviation of query and key."""
    shares_lists: bool = False
    """Whether the query heads of a key/value head have one list."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.bounds is None else torch.tensor(self.bounds, dtype=torch.int32, device="cuda")

    @property
    def documents(self) -> Documents | None:
        return None if self.bounds is None else Documents(self.bounds)

    def index(self) -> VerticalSlashIndex:
        """Random lists, each of another length."""
        rows = self.batch if self.bounds is None else len(self.bounds) - 1
        return random_index(
            rows,
            self.num_kv_heads if self.shares_lists else self.num_heads,
            self.seq_len,
            BLOCK,
            cu_seqlens=self.bounds,
            max_vertical=self.max_vertical,
            max_slash=self.max_slash,
        ).to("cuda")

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Standard normal query, key and value; query and key times ``magnitude``."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        tensors = [torch.randn(self.batch, self.seq_len, h, self.head_dim, device="cuda") for h in heads]
        query, key, value = (t * m for t, m in zip(tensors, (self.magnitude, self.magnitude, 1.0), strict=True))
        return query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Random gradients of out and lse."""
        shape = (self.batch, self.seq_len, self.num_heads)
        grad_out = torch.randn(*shape, self.head_dim, device="cuda").to(self.dtype)
        return grad_out, torch.randn(self.batch, self.num_heads, self.seq_len, device="cuda")

    def __str__(self) -> str:
        parts = [f"S{self.seq_len}", f"h{self.num_heads}/{self.num_kv_heads}", f"d{self.head_dim}", f"b{self.batch}"]
        parts += [str(self.dtype).removeprefix("torch.")]
        if self.bounds is not None:
            parts.append(f"documents{len(self.bounds) - 1}")
        if self.shares_lists:
            parts.append("shared")
        return "-".join(parts)


def rank_by_rank(
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: VerticalSlashIndex,
    *,
    grad_out: Tensor,
    grad_lse: Tensor,
    layout: SequenceLayout,
    softmax_scale: float,
    sources_together: int = 1,
    documents: Documents | None = None,
) -> dict[str, Tensor]:
    """Attention and its gradients: the queries of each rank against the keys of one source after the other.

    Every rank begins with the keys of rank 0, so that the first step of most meets few of its slashes or none.

    Args:
        sources_together: how many source ranks' keys one step takes, laid end to end.

    Returns:
        What :func:`megatron_mtraining.testing.error_budget.run_with_gradients` returns.
    """
    size = layout.cp_size
    blocks = [layout.blocks(rank) for rank in range(size)]
    sources = [torch.cat(blocks[i : i + sources_together]) for i in range(0, size, sources_together)]
    whole = BlockGeometry.whole(seq_len=layout.seq_len, block_size=BLOCK, documents=documents)
    packed = backend.pack(key, value, index, whole)
    results = {
        "out": torch.empty_like(query),
        "lse": query.new_empty(query.shape[0], query.shape[2], query.shape[1], dtype=torch.float32),
        "grad_query": torch.empty_like(query),
    }
    grad_keys = torch.zeros(2, *key.shape, device="cuda")
    grad_packed = torch.zeros(packed.shape, device="cuda")

    def geometry(query_blocks: Tensor, key_blocks: Tensor) -> BlockGeometry:
        return BlockGeometry(
            seq_len=layout.seq_len,
            block_size=BLOCK,
            query_blocks=query_blocks,
            key_blocks=key_blocks,
            documents=documents,
        )

    for mine in blocks:
        rows = _tokens(mine)
        local = query[:, rows]
        partial: AttentionOutput | None = None
        for source in sources:
            keys = _tokens(source)
            held = (local, key[:, keys], value[:, keys])
            given = (index, geometry(mine, source))
            options = {"softmax_scale": softmax_scale, "is_last": source is sources[-1]}
            options |= {"packed": packed if partial is None else None, "previous": partial}
            partial = backend.forward(*held, *given, **options)
        results["out"][:, rows], results["lse"][:, :, rows] = partial
        delta = backend.softmax_delta(grad_out[:, rows], partial.out, grad_lse[:, :, rows])
        grad_local: Tensor | None = None
        for source in sources:
            keys = _tokens(source)
            held = (grad_out[:, rows], local, key[:, keys], value[:, keys])
            given = (partial.lse, delta, index, geometry(mine, source))
            options = {"softmax_scale": softmax_scale, "is_last": source is sources[-1]}
            options |= {"packed": packed if grad_local is None else None, "previous": grad_local}
            grad_local, part, own_share = backend.backward(*held, *given, **options)
            if own_share is not None:
                grad_packed += own_share
            grad_keys[:, :, keys] += part
        results["grad_query"][:, rows] = grad_local
    home = backend.unpack(grad_packed, index, whole, grad_kv=grad_keys, dtype=query.dtype)
    return results | {"grad_key": home[0], "grad_value": home[1]}


def _tokens(blocks: Tensor) -> Tensor:
    """Positions of the tokens of whole blocks, on the GPU."""
    return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten().cuda()
