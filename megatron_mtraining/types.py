"""Types that calls hand to each other: an attention result, a sparse index, the documents of a packed sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import gt
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from .errors import as_integer, check_type, invalid

ROW_MASK_BITS = 64
"""Bits of the word that says which rows of a block see a chunk."""


class AttentionOutput(NamedTuple):
    """Attention of some queries over some keys, normalised over those keys.

    Two of them over disjoint keys combine with :func:`megatron_mtraining.merge_partials`.
    """

    out: Tensor
    """``[batch, seq, num_heads, head_dim]``; 0 in a row that has no key."""

    lse: Tensor
    """``[batch, num_heads, seq]``, natural log, float32 (float64 for float64 input); -inf in a row without keys."""


class AttentionIndex:
    """Index that attention takes: the keys that each query keeps. Base class of both kinds."""

    __slots__ = ()

    block_size: int
    """Tokens in a block."""

    has_columns: ClassVar[bool]
    """True: attention packs the columns' rows and handles them apart."""

    is_global: ClassVar[bool]
    """True: the same index on every rank. False: each rank has the lists of its own queries."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors that it holds on its device, in the order in which :attr:`rebuild` takes them.

        The first has the shape ``[rows, num_lists, ...]``.
        """
        raise NotImplementedError

    @property
    def rebuild(self) -> Callable[..., Self]:
        """Function that makes the index of its tensors again and holds none of them: for autograd, which keeps them."""
        raise NotImplementedError

    @property
    def widths(self) -> tuple[object, ...]:
        """Shapes that ranks must have in common, as far as the host knows them."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Batch size; of columns and distances with packed documents the number of these."""
        return self.tensors[0].shape[0]

    @property
    def num_lists(self) -> int:
        """Number of query heads, or of key/value heads where the query heads of a group share a list."""
        return self.tensors[0].shape[1]

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return self.tensors[0].device

    @property
    def num_bytes(self) -> int:
        """Bytes that a layer keeps for its backward."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors if tensor is not None)

    def to(self, device: torch.device | str) -> Self:
        """Return the same index on ``device``."""
        return self.rebuild(*(None if tensor is None else tensor.to(device) for tensor in self.tensors))

    def per_head(self, num_heads: int) -> Self:
        """Return the same index with a list for each of ``num_heads`` query heads.

        Raises:
            ValueError: ``num_heads`` is not a multiple of ``num_lists``.
        """
        group, rest = divmod(num_heads, self.num_lists)
        if rest:
            raise invalid("num_heads", f"a multiple of the index's {self.num_lists} lists", num_heads)
        return self if group == 1 else self._repeated(group)

    def _repeated(self, group: int) -> Self:
        """Return the index with each list ``group`` times, one after the other."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class VerticalSlashIndex(AttentionIndex):
    """Keys that each query head keeps: vertical key columns and slash block distances.

    ``rows`` below is the batch size, or with packed documents the number of documents (batch is then 1). ``num_lists``
    is the number of query heads, or that of key/value heads: then the query heads of a group keep the same keys. Head
    ``h`` has list ``h // (num_heads // num_lists)``.
    Query ``q`` may see key ``k`` when ``k <= q``, both are in one document, and ``k`` is a vertical or
    ``q // block_size - k // block_size`` is a slash. Positions are global, in documents too.
    """

    vertical: Tensor
    """int32 ``[rows, num_lists, max_v]``: token positions, ascending, padded with the sequence length."""

    num_vertical: Tensor
    """int32 ``[rows, num_lists]``: number of entries of ``vertical`` that count."""

    slash: Tensor
    """int32 ``[rows, num_lists, max_s]``: block distances, ascending from 0, padded with the number of blocks."""

    num_slash: Tensor
    """int32 ``[rows, num_lists]``: number of entries of ``slash`` that count; at least 1: distance 0 is always kept."""

    block_size: int = 64
    """Tokens in a block."""

    has_columns: ClassVar[bool] = True
    is_global: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("vertical", "num_vertical", "slash", "num_slash"):
            check_type(f"index.{name}", getattr(self, name), Tensor, "a tensor")
        object.__setattr__(self, "block_size", as_integer("index.block_size", self.block_size, least=1))
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
    def widths(self) -> tuple[object, ...]:
        return self.rows, self.num_lists, self.vertical.shape[2], self.slash.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.vertical, self.num_vertical, self.slash, self.num_slash

    @property
    def rebuild(self) -> Callable[..., VerticalSlashIndex]:
        return partial(VerticalSlashIndex, block_size=self.block_size)

    def _repeated(self, group: int) -> VerticalSlashIndex:
        # Not repeat_interleave, which would write out lists that the dense index holds once.
        repeated = (table.unsqueeze(2).expand(-1, -1, group, *table.shape[2:]).flatten(1, 2) for table in self.tensors)
        return self.rebuild(*repeated)

    @staticmethod
    def concatenate(indices: Sequence[VerticalSlashIndex]) -> VerticalSlashIndex:
        """Return the rows of all, one after the other."""
        return indices[0].rebuild(*map(torch.cat, zip(*(index.tensors for index in indices), strict=True)))

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
        """Build an index from ``[rows][num_lists]`` lists of positions and distances, in any order, repeats too.

        Raises:
            ValueError: an entry is no integer from 0.
        """

        def padded(name: str, lists: Sequence[Sequence[Sequence[int]]], padding: int) -> tuple[Tensor, Tensor]:
            lists = [[_ascending(f"an entry of {name}", entries) for entries in row] for row in lists]
            counts = torch.tensor([[len(entries) for entries in row] for row in lists], dtype=torch.int32, device="cpu")
            table = torch.full((*counts.shape, max(1, int(counts.max()))), padding, dtype=torch.int32, device="cpu")
            for i, row in enumerate(lists):
                for j, entries in enumerate(row):
                    table[i, j, : counts[i, j]] = torch.tensor(entries, dtype=torch.int32, device="cpu")
            return table.to(device), counts.to(device)

        num_blocks = -(-seq_len // block_size)
        tables = (*padded("vertical", vertical, seq_len), *padded("slash", slash, num_blocks))
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
        """Return the index that keeps every causal pair: all distances, no verticals; one list for all rows, heads."""
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


def _ascending(name: str, entries: Sequence[int]) -> list[int]:
    return sorted({as_integer(name, entry, least=0) for entry in entries})


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BlockListIndex(AttentionIndex):
    """Chunks of keys that each block of one rank's queries keeps: a list for every batch row, head and query block.

    A chunk is ``chunk_blocks`` neighbouring blocks of the global sequence. Query ``q`` may see key ``k`` when
    ``k <= q``, both are in one document, and chunk ``k // block_size // chunk_blocks`` stands in the list of the block
    of ``q``, with bit ``q % block_size`` set in its row mask where there are row masks. A list may name chunks of
    which a row sees nothing, and may be empty.

    Each rank has the lists of its own queries only, in the order of its slots. An entry takes 4 bytes, 12 with a row
    mask: at 524288 tokens and 16 heads, a tenth of all pairs in chunks of 128 is 110 MB over all ranks together, and
    MoBA's 12 of 128 chunks, no two tokens of a block agreeing, 100 MB. Blocks by blocks would be a gigabyte of bytes.
    """

    starts: Tensor
    """int32 ``[batch, num_lists, query blocks + 1]``: block ``i`` has entries ``starts[..., i]`` up to the next."""

    chunks: Tensor
    """int32 ``[entries]``: numbers of chunks, ascending in each list."""

    row_masks: Tensor | None = None
    """int64 ``[entries]``: rows of the query block that see the chunk, the first row lowest; None where all do."""

    chunk_blocks: int = 1
    """Blocks in a chunk."""

    block_size: int = 64
    """Tokens in a block; with row masks at most ROW_MASK_BITS."""

    query_blocks: Tensor | None = None
    """int64 ``[query blocks]``, on the CPU: the global block that each slot's list is for; by default 0, 1, 2, ...

    Attention refuses lists that are for other blocks than the queries that it is given.
    """

    has_columns: ClassVar[bool] = False
    is_global: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, dims, dtype in (
            ("starts", 3, torch.int32),
            ("chunks", 1, torch.int32),
            ("row_masks", 1, torch.int64),
        ):
            tensor = getattr(self, name)
            if tensor is None and name == "row_masks":
                continue
            check_type(f"index.{name}", tensor, Tensor, "a tensor")
            if tensor.dtype != dtype or tensor.dim() != dims:
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise invalid(f"index.{name}", f"{dtype} with {dims} dimensions", found)
            if tensor.device != self.starts.device:
                raise invalid(f"index.{name}", f"on {self.starts.device} as index.starts is", tensor.device)
        for name in ("block_size", "chunk_blocks"):
            object.__setattr__(self, name, as_integer(f"index.{name}", getattr(self, name), least=1))
        if self.row_masks is not None and self.row_masks.shape != self.chunks.shape:
            raise invalid("index.row_masks", f"of the {self.chunks.numel()} entries of chunks", self.row_masks.numel())
        if self.row_masks is not None and self.block_size > ROW_MASK_BITS:
            raise invalid("index.block_size", f"at most {ROW_MASK_BITS}, the bits of a row mask", self.block_size)
        if self.query_blocks is None:
            object.__setattr__(self, "query_blocks", torch.arange(self.num_query_blocks, device="cpu"))
        blocks = self.query_blocks
        check_type("index.query_blocks", blocks, Tensor, "a tensor")
        if blocks.dtype != torch.int64 or blocks.device.type != "cpu" or blocks.shape != (self.num_query_blocks,):
            found = f"{blocks.dtype} {tuple(blocks.shape)} on {blocks.device}"
            raise invalid("index.query_blocks", f"int64 of shape ({self.num_query_blocks},) on the CPU", found)

    @property
    def num_query_blocks(self) -> int:
        """Blocks of queries that have a list: this rank's."""
        return self.starts.shape[2] - 1

    @property
    def widths(self) -> tuple[object, ...]:
        return self.rows, self.num_lists, "block lists", self.chunk_blocks, self.row_masks is not None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.starts, self.chunks, self.row_masks

    @property
    def rebuild(self) -> Callable[..., BlockListIndex]:
        sizes = {"chunk_blocks": self.chunk_blocks, "block_size": self.block_size}
        return partial(BlockListIndex, **sizes, query_blocks=self.query_blocks)

    @property
    def numbers(self) -> Tensor:
        """int64 ``[rows, num_lists, query blocks]``: the number of each list, as :meth:`of_lists` counts them."""
        shape = self.starts[..., 1:].shape
        return torch.arange(shape.numel(), device=self.device).view(shape)

    def of_lists(self, numbers: Tensor, query_blocks: Tensor) -> BlockListIndex:
        """Return an index of some lists, in another order, or of some more than once. The host waits for the device.

        Args:
            numbers: int64 ``[rows, num_lists, query blocks]``: those of :attr:`numbers` that it has.
            query_blocks: block of each slot, as the index keeps them.
        """
        counts = self.starts.diff(dim=-1).flatten()[numbers].long()
        ends = counts.flatten().cumsum(0).view(counts.shape)
        firsts = ends - counts
        shift = (self.starts[..., :-1].flatten()[numbers] - firsts).flatten().repeat_interleave(counts.flatten())
        entries = torch.arange(len(shift), device=self.device) + shift
        masks = None if self.row_masks is None else self.row_masks[entries]
        starts = torch.cat([firsts[..., :1], ends], dim=-1).int()
        return replace(self, starts=starts, chunks=self.chunks[entries], row_masks=masks, query_blocks=query_blocks)

    def _repeated(self, group: int) -> BlockListIndex:
        return self.of_lists(self.numbers.repeat_interleave(group, dim=1), self.query_blocks)

    @classmethod
    def from_lists(
        cls,
        chunks: Sequence[Sequence[Sequence[Sequence[int]]]],
        row_masks: Sequence[Sequence[Sequence[Sequence[int]]]] | None = None,
        *,
        chunk_blocks: int = 1,
        block_size: int = 64,
        query_blocks: Tensor | None = None,
    ) -> BlockListIndex:
        """Build an index from ``[batch][num_lists][query blocks]`` lists of ascending chunks and their row masks."""

        def flat(nested: Sequence[Sequence[Sequence[Sequence[int]]]]) -> list[int]:
            return [
                as_integer("an entry of chunks", entry, least=0)
                for row in nested
                for head in row
                for entries in head
                for entry in entries
            ]

        counts = torch.tensor([[[len(entries) for entries in head] for head in row] for row in chunks], device="cpu")
        ends = counts.flatten().cumsum(0).view(counts.shape)
        starts = torch.cat([(ends - counts)[..., :1], ends], dim=-1).int()
        masks = None
        if row_masks is not None:
            unsigned = [mask % (1 << 64) for row in row_masks for head in row for masks in head for mask in masks]
            masks = torch.tensor([mask - (mask >> 63 << 64) for mask in unsigned], dtype=torch.int64, device="cpu")
        entries = torch.tensor(flat(chunks), dtype=torch.int32, device="cpu")
        sizes = {"chunk_blocks": chunk_blocks, "block_size": block_size}
        return cls(starts, entries, masks, **sizes, query_blocks=query_blocks)


@dataclass(frozen=True, slots=True)
class Documents:
    """Bounds of the documents of one packed sequence, as host integers."""

    bounds: tuple[int, ...]
    """``cu_seqlens``: document ``i`` holds tokens ``bounds[i]`` to ``bounds[i + 1] - 1``; empty documents are legal."""

    @property
    def count(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.bounds) - 1

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """``(first token, one past the last)`` of each document."""
        return tuple(pairwise(self.bounds))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, *, seq_len: int) -> Documents:
        """Read and check ``cu_seqlens`` (int32 ``[documents + 1]``, any device; a CUDA tensor costs one host sync).

        Raises:
            ValueError: wrong dtype or shape, not starting at 0, not ascending, or not ending at ``seq_len``.
        """
        check_type("cu_seqlens", cu_seqlens, Tensor, "an int32 tensor")
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise invalid(
                "cu_seqlens",
                "int32 with one dimension and at least 2 entries",
                f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}",
            )
        bounds = tuple(cu_seqlens.tolist())
        if bounds[0] != 0:
            raise invalid("cu_seqlens[0]", "0", bounds[0])
        if any(map(gt, bounds, bounds[1:])):
            i = next(i for i, (low, high) in enumerate(pairwise(bounds)) if low > high)
            raise invalid("cu_seqlens", "ascending", f"{bounds[i]} before {bounds[i + 1]} at entry {i}")
        if bounds[-1] != seq_len:
            raise invalid(
                "cu_seqlens[-1]",
                f"the sequence length {seq_len}",
                bounds[-1],
                "Add the padding at the end as a document of its own.",
            )
        return cls(bounds)
