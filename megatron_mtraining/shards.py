"""A sequence that is cut into the parts of several ranks, as one of them sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import SequenceLayout
from .layout.blocks import blocks_of
from .tensors import cached_tensors, to_device
from .transport import Transport


@dataclass(frozen=True, slots=True)
class SequenceShards:
    """Tokens that each rank holds, and this rank's way to the others. One device is the case of one rank."""

    layout: SequenceLayout
    transport: Transport

    def positions(self, device: torch.device) -> Tensor:
        """int64 ``[local_len]`` on ``device``: global positions of this rank's tokens. Copies block numbers only."""
        blocks = blocks_of(self.layout, self.transport.rank)
        starts = to_device(blocks, device) * self.layout.block_size
        positions = (starts[:, None] + torch.arange(self.layout.block_size, device=device)).flatten()
        return positions[: self.layout.local_len]

    def assemble_rows(self, query: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Assemble rows of the global query, on every rank.

        Args:
            query: this rank's ``[batch, local_len, num_heads, head_dim]``.
            rows: global positions.

        Returns:
            ``[batch, len(rows), num_heads, head_dim]`` in the dtype of ``query``, joined bit for bit by one all-reduce
            whose shape depends on nothing but the number of rows.
        """
        owned, local = (
            to_device(positions, query.device) for positions in owned_rows(self.layout, self.transport.rank, rows)
        )
        return self.join_rows(query, local, owned, len(rows))

    def join_rows(self, query: Tensor, local: Tensor, owned: Tensor, count: int) -> Tensor:
        """Join rows as :meth:`assemble_rows` does, where the rows are on the device already.

        Args:
            query: this rank's.
            local: int64: the rows that it holds, among its tokens.
            owned: int64: their positions among all ``count`` rows.
            count: rows of all ranks.
        """
        held = query.index_select(1, local)
        if self.transport.size == 1:
            return held
        assembled = query.new_zeros(query.shape[0], count, *query.shape[2:])
        return self.transport.assemble(assembled.index_copy_(1, owned, held))


def count_before(layout: SequenceLayout, rank: int, positions: tuple[int, ...]) -> list[int]:
    """Count a rank's tokens that stand before each of some global positions."""
    blocks = blocks_of(layout, rank)
    counts = []
    for position in positions:
        whole, rest = divmod(position, layout.block_size)
        slot = int(torch.searchsorted(blocks, whole))
        in_block = rest if slot < len(blocks) and int(blocks[slot]) == whole else 0
        counts.append(min(slot * layout.block_size, layout.local_len) + in_block)
    return counts


@cached_tensors(maxsize=8)
def owned_rows(layout: SequenceLayout, rank: int, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the positions in ``rows``, on the CPU, of those that the rank holds, and among its tokens."""
    position = torch.tensor(rows, device="cpu")
    block, offset = position // layout.block_size, position % layout.block_size
    owned = (layout.owners()[block] == rank).nonzero().flatten()
    return owned, (layout.slots()[block] * layout.block_size + offset)[owned]
