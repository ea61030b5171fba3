"""Layouts of the tokens: the rank and the slot of each block of the sequence, in integers; and tensors cut by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import LAYOUTS
from .errors import as_integer, invalid
from .tensors import cached_tensors


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Layout of the blocks of a sequence over the ranks.

    ``contiguous``
        rank r holds the r-th of ``cp_size`` equal pieces.
    ``zigzag``
        Megatron's own split: of ``2 * cp_size`` equal chunks, rank r holds chunks r and ``2 * cp_size - 1 - r``.
    ``striped``
        block b is on rank ``b % cp_size`` (the MTraining paper's).
    ``rotated``
        block b of stripe ``q = b // cp_size`` is on rank ``(b + q * (q + 1) / 2) % cp_size``; the growing offset puts
        a slash at a multiple of ``cp_size`` blocks into all ring steps, where ``striped`` puts it into one.
    ``node_striped``
        blocks are dealt to the nodes one by one, and inside a node to its ranks. Ranks of a node then have keys at
        the same distances in every step of a hierarchical ring, where ``striped`` has them a node apart. Every
        ``node_size`` stripes the nodes swap, so that none is ahead of the others for the whole sequence. In one
        node, and in nodes of one rank, it is ``striped``.

    A rank keeps its blocks in ascending order; a block's position in that order is its slot.

    Raises:
        ValueError: unknown kind, ``seq_len`` that does not divide evenly (see :meth:`required_multiple`), or
            ``node_striped`` without a ``node_size`` that divides ``cp_size``.
    """

    kind: str
    seq_len: int = field(kw_only=True)
    cp_size: int = field(kw_only=True)
    block_size: int = field(default=64, kw_only=True)
    node_size: int | None = field(default=None, kw_only=True)
    """Ranks in a node, neighbours in the group: the inner ring's. ``node_striped`` needs it, the others forget it."""

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise invalid("layout", f"one of {', '.join(LAYOUTS)}", repr(self.kind))
        for name in ("seq_len", "cp_size", "block_size"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least=1))
        multiple = self.required_multiple(self.kind, cp_size=self.cp_size, block_size=self.block_size)
        if self.seq_len % multiple:
            raise invalid(
                "seq_len",
                f"a multiple of {multiple} for the {self.kind} layout over {self.cp_size} ranks",
                self.seq_len,
                f"Pad the sequence to {-(-self.seq_len // multiple) * multiple} tokens with a zero loss mask.",
            )
        if self.kind != "node_striped" or self.cp_size == 1:
            object.__setattr__(self, "node_size", None)
        else:
            remedy = "Give the number of ranks in an inner ring."
            rule = f"a divisor of the {self.cp_size} ranks for the node_striped layout"
            node_size = as_integer("node_size", self.node_size, least=1, rule=rule, remedy=remedy)
            if self.cp_size % node_size:
                raise invalid("node_size", rule, node_size, remedy)
            object.__setattr__(self, "node_size", node_size)

    @staticmethod
    def required_multiple(kind: str, *, cp_size: int, block_size: int = 64) -> int:
        """Return the number that must divide ``seq_len``; 1 on one rank, where the last block may be short."""
        if cp_size == 1:
            return 1
        return block_size * cp_size * (2 if kind == "zigzag" else 1)

    @property
    def num_blocks(self) -> int:
        """Blocks in the whole sequence, a short last one included."""
        return -(-self.seq_len // self.block_size)

    @property
    def num_local_blocks(self) -> int:
        """Blocks on each rank."""
        return self.num_blocks // self.cp_size

    @property
    def local_len(self) -> int:
        """Tokens on each rank."""
        return self.seq_len // self.cp_size

    def owners(self) -> Tensor:
        """int64 ``[num_blocks]``, on the CPU: the rank that holds each block."""
        block = torch.arange(self.num_blocks, device="cpu")
        size = self.cp_size
        if size == 1:
            return torch.zeros_like(block)
        if self.kind == "contiguous":
            return block // self.num_local_blocks
        if self.kind == "zigzag":
            chunk = block * 2 * size // self.num_blocks
            return torch.minimum(chunk, 2 * size - 1 - chunk)
        if self.kind == "striped" or self.node_size == 1:
            return block % size
        stripe = block // size
        if self.kind == "rotated":
            return (block + stripe * (stripe + 1) // 2) % size
        num_nodes = size // self.node_size
        node, local_rank = (block + stripe // self.node_size) % num_nodes, block // num_nodes % self.node_size
        return node * self.node_size + local_rank

    def slots(self) -> Tensor:
        """int64 ``[num_blocks]``, on the CPU: each block's position among the blocks of its rank."""
        slots = torch.empty(self.num_blocks, dtype=torch.int64, device="cpu")
        slots[self.blocks_by_rank().flatten()] = torch.arange(self.num_local_blocks, device="cpu").repeat(self.cp_size)
        return slots

    def blocks_by_rank(self) -> Tensor:
        """int64 ``[cp_size, num_local_blocks]``, on the CPU: each rank's blocks, ascending: the maps' inverse."""
        return torch.argsort(self.owners(), stable=True).view(self.cp_size, self.num_local_blocks)

    def blocks(self, cp_rank: int) -> Tensor:
        """int64 ``[num_local_blocks]``, on the CPU: the blocks of one rank, ascending."""
        return self.blocks_by_rank()[cp_rank]


def check_layout(given: object) -> None:
    """Refuse what is no layout, the name of one too, before anything is asked of it.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(given, SequenceLayout):
        remedy = "SequenceLayout(kind, seq_len=..., cp_size=...) makes one."
        raise invalid("layout", "a SequenceLayout", repr(given), remedy)


@cached_tensors(maxsize=1024)
def blocks_of(layout: SequenceLayout, *ranks: int) -> Tensor:
    """int64, on the CPU: the blocks of ``ranks``, one rank after the other, each rank's ascending.

    The same tensor for the same arguments; nobody writes to it.
    """
    table = _blocks_by_rank(layout)
    return torch.cat([table[rank] for rank in ranks])


@cached_tensors(maxsize=16)
def _blocks_by_rank(layout: SequenceLayout) -> Tensor:
    return layout.blocks_by_rank()


def token_positions(layout: SequenceLayout, *, cp_rank: int) -> Tensor:
    """Return the global positions of the tokens that a rank holds, in its order.

    Args:
        layout: where each block lives.
        cp_rank: the rank, from 0 to ``layout.cp_size - 1``.

    Returns:
        int64 ``[layout.local_len]``, on the CPU, ascending.

    Raises:
        ValueError: the layout has no such rank.
    """
    check_layout(layout)
    rule = f"in [0, {layout.cp_size})"
    rank = as_integer("cp_rank", cp_rank, least=0, rule=rule)
    if rank >= layout.cp_size:
        raise invalid("cp_rank", rule, rank)
    starts = layout.blocks(rank) * layout.block_size
    positions = (starts[:, None] + torch.arange(layout.block_size, device="cpu")).flatten()
    return positions[: layout.local_len]


def shard_sequence(tensor: Tensor, layout: SequenceLayout, *, cp_rank: int, dim: int) -> Tensor:
    """Return the part of ``tensor`` that ``cp_rank`` holds.

    Args:
        tensor: any shape with ``layout.seq_len`` entries along ``dim``.
        layout: where each block lives.
        cp_rank: the rank whose part is wanted.
        dim: the sequence dimension.

    Returns:
        A copy with ``layout.local_len`` entries along ``dim``, ordered as :func:`token_positions` says.

    Raises:
        ValueError: ``dim`` has another length than the sequence, or the layout no such rank.
    """
    check_layout(layout)
    if tensor.shape[dim] != layout.seq_len:
        raise invalid(f"tensor.shape[{dim}]", f"the layout's seq_len {layout.seq_len}", tensor.shape[dim])
    return tensor.index_select(dim, token_positions(layout, cp_rank=cp_rank).to(tensor.device))


def gather_sequence(parts: Sequence[Tensor], layout: SequenceLayout, *, dim: int) -> Tensor:
    """Gather every rank's part into one tensor: the inverse of :func:`shard_sequence`.

    Args:
        parts: in rank order, each with ``layout.local_len`` entries along ``dim``, of one dtype and device.
        layout: where each block lives.
        dim: the sequence dimension.

    Returns:
        A copy with ``layout.seq_len`` entries along ``dim``.

    Raises:
        ValueError: other than one part for each rank, or a part of another length.
    """
    check_layout(layout)
    if len(parts) != layout.cp_size:
        raise invalid("parts", f"one tensor for each of {layout.cp_size} ranks", f"{len(parts)} tensors")
    for rank, part in enumerate(parts):
        if part.shape[dim] != layout.local_len:
            raise invalid(f"parts[{rank}].shape[{dim}]", f"the layout's local_len {layout.local_len}", part.shape[dim])
    order = torch.cat([token_positions(layout, cp_rank=rank) for rank in range(layout.cp_size)])
    return torch.cat(list(parts), dim).index_select(dim, torch.argsort(order).to(parts[0].device))
