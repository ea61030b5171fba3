"""What calls hand to each other: an attention result, a sparse index, the documents of a packed sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import invalid


class AttentionOutput(NamedTuple):
    """Attention of some queries over some keys, normalised over those keys.

    Two of them over disjoint keys combine with :func:`megatron_mtraining.merge_partials`.
    """

    out: Tensor
    """``[batch, seq, num_heads, head_dim]``; 0 in a row that has no key."""

    lse: Tensor
    """``[batch, num_heads, seq]``, natural log, float32 (float64 for float64 input); -inf in a row without keys."""


@dataclass(frozen=True, slots=True, eq=False)
class VerticalSlashIndex:
    """Which keys each query head keeps: vertical key columns and slash block distances.

    ``rows`` below is the batch size, or with packed documents the number of documents (batch is then 1). ``num_lists``
    is the number of query heads, or that of key/value heads: then the query heads of a group keep the same keys. Head
    ``h`` has list ``h // (num_heads // num_lists)``.
    Query ``q`` may see key ``k`` when ``k <= q``, both are in one document, and ``k`` is a vertical or
    ``q // block_size - k // block_size`` is a slash. Positions are global, in documents too.
    """

    vertical: Tensor
    """int32 ``[rows, num_lists, max_v]``: token positions, ascending, padded with the sequence length."""

    num_vertical: Tensor
    """int32 ``[rows, num_lists]``: how many entries of ``vertical`` count."""

    slash: Tensor
    """int32 ``[rows, num_lists, max_s]``: block distances, ascending from 0, padded with the number of blocks."""

    num_slash: Tensor
    """int32 ``[rows, num_lists]``: how many entries of ``slash`` count; at least 1, since distance 0 is always kept."""

    block_size: int = 64
    """Tokens in a block."""

    def __post_init__(self) -> None:
        for name, dims in (("vertical", 3), ("num_vertical", 2), ("slash", 3), ("num_slash", 2)):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.dim() != dims:
                raise invalid(f"index.{name}", f"int32 with {dims} dimensions", f"{tensor.dtype} {tuple(tensor.shape)}")
            if tensor.shape[:2] != self.num_vertical.shape:
                raise invalid(
                    f"index.{name}", f"of leading shape {tuple(self.num_vertical.shape)}", tuple(tensor.shape)
                )
            if tensor.device != self.vertical.device:
                raise invalid(f"index.{name}", f"on {self.vertical.device} as index.vertical is", tensor.device)

    @property
    def rows(self) -> int:
        """Batch size, or the number of packed documents."""
        return self.vertical.shape[0]

    @property
    def num_lists(self) -> int:
        """Number of query heads, or of key/value heads where the query heads of a group share a list."""
        return self.vertical.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes that a layer keeps for its backward."""
        tensors = (self.vertical, self.num_vertical, self.slash, self.num_slash)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def to(self, device: torch.device | str) -> VerticalSlashIndex:
        """The same index on ``device``."""
        moved = (t.to(device) for t in (self.vertical, self.num_vertical, self.slash, self.num_slash))
        return VerticalSlashIndex(*moved, block_size=self.block_size)

    def per_head(self, num_heads: int) -> VerticalSlashIndex:
        """The same index with a list for each of ``num_heads`` query heads.

        Raises:
            ValueError: ``num_heads`` is not a multiple of ``num_lists``.
        """
        if num_heads % self.num_lists:
            raise invalid("num_heads", f"a multiple of the index's {self.num_lists} lists", num_heads)
        group = num_heads // self.num_lists
        tables = (self.vertical, self.num_vertical, self.slash, self.num_slash)
        # Not repeat_interleave, which would write out lists that the dense index holds once.
        repeated = (table.unsqueeze(2).expand(-1, -1, group, *table.shape[2:]).flatten(1, 2) for table in tables)
        return VerticalSlashIndex(*repeated, block_size=self.block_size)

    @classmethod
    def from_lists(
        cls,
        vertical: Sequence[Sequence[Sequence[int]]],
        slash: Sequence[Sequence[Sequence[int]]],
        *,
        seq_len: int,
        block_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> VerticalSlashIndex:
        """Builds an index from ``[rows][num_lists]`` lists of positions and of distances, in any order."""

        def padded(lists: Sequence[Sequence[Sequence[int]]], padding: int) -> tuple[Tensor, Tensor]:
            counts = torch.tensor([[len(set(entries)) for entries in row] for row in lists], dtype=torch.int32)
            table = torch.full((*counts.shape, max(1, int(counts.max()))), padding, dtype=torch.int32)
            for i, row in enumerate(lists):
                for j, entries in enumerate(row):
                    table[i, j, : counts[i, j]] = torch.tensor(sorted(set(entries)), dtype=torch.int32)
            return table.to(device), counts.to(device)

        num_blocks = -(-seq_len // block_size)
        tables = (*padded(vertical, seq_len), *padded(slash, num_blocks))
        return cls(*tables, block_size=block_size)

    @classmethod
    def dense(
        cls,
        *,
        rows: int,
        num_heads: int,
        seq_len: int,
        block_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> VerticalSlashIndex:
        """The index that keeps every causal pair: all distances, no verticals; one list for all rows and heads."""
        num_blocks = -(-seq_len // block_size)
        distances = torch.arange(num_blocks, dtype=torch.int32, device=device)
        shape = (rows, num_heads)
        return cls(
            torch.full((1, 1, 1), seq_len, dtype=torch.int32, device=device).expand(*shape, 1),
            torch.zeros(1, 1, dtype=torch.int32, device=device).expand(shape),
            distances.expand(*shape, num_blocks),
            torch.full((1, 1), num_blocks, dtype=torch.int32, device=device).expand(shape),
            block_size=block_size,
        )


@dataclass(frozen=True, slots=True)
class Documents:
    """Where the documents of one packed sequence begin and end, as host integers."""

    bounds: tuple[int, ...]
    """``cu_seqlens``: document ``i`` holds tokens ``bounds[i]`` to ``bounds[i + 1] - 1``; empty documents are legal."""

    @property
    def count(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.bounds) - 1

    @property
    def spans(self) -> list[tuple[int, int]]:
        """``(first token, one past the last)`` of each document."""
        return list(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, *, seq_len: int) -> Documents:
        """Reads and checks ``cu_seqlens`` (int32 ``[documents + 1]``, any device; a CUDA tensor costs one host sync).

        Raises:
            ValueError: wrong dtype or shape, not starting at 0, not ascending, or not ending at ``seq_len``.
        """
        if not isinstance(cu_seqlens, Tensor):
            raise invalid("cu_seqlens", "an int32 tensor", type(cu_seqlens).__name__)
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise invalid(
                "cu_seqlens",
                "int32 with one dimension and at least 2 entries",
                f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}",
            )
        bounds = tuple(cu_seqlens.tolist())
        if bounds[0] != 0:
            raise invalid("cu_seqlens[0]", "0", bounds[0])
        for i, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            if high < low:
                raise invalid("cu_seqlens", "ascending", f"{low} before {high} at entry {i}")
        if bounds[-1] != seq_len:
            raise invalid(
                "cu_seqlens[-1]",
                f"the sequence length {seq_len}",
                bounds[-1],
                "Add the padding at the end as a document of its own.",
            )
        return cls(bounds)
