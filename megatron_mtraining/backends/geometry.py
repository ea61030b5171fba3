"""Places of the tokens of one kernel call in the global sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors import cached_tensors, to_device
from ..types import Documents


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGeometry:
    """Global block of each local block of queries and of keys.

    A call may hold any blocks in any order: one device's whole sequence, one rank's queries against another rank's
    keys, or against the keys of several ranks laid end to end. Kernels see only these maps, so every layout and
    schedule runs on the same ones. Slot i of a tensor starts at its token ``i * block_size``; only the last slot may
    be short, and no block is there twice. Nobody writes to the tensors: what a backend makes of them it keeps.
    """

    seq_len: int
    """Tokens in the global sequence; positions from here on (the tail of a short last block) do not exist."""

    block_size: int
    """Tokens in a block."""

    query_blocks: Tensor
    """int64 ``[num_query_blocks]``, on the CPU: global block in each block slot of ``query``."""

    key_blocks: Tensor
    """int64 ``[num_key_blocks]``, on the CPU: global block in each block slot of ``key`` and ``value``."""

    documents: Documents | None = None
    """The packed documents, or None when each batch row is one document."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the global sequence, a short last one included."""
        return -(-self.seq_len // self.block_size)

    @classmethod
    def whole(cls, *, seq_len: int, block_size: int, documents: Documents | None = None) -> BlockGeometry:
        """Return the geometry of one device that holds the whole sequence in order."""
        blocks = _first_blocks(-(-seq_len // block_size))
        return cls(seq_len=seq_len, block_size=block_size, query_blocks=blocks, key_blocks=blocks, documents=documents)


@cached_tensors(maxsize=16)
def _first_blocks(num_blocks: int) -> Tensor:
    """Return the same tensor for the same number: what is made of a geometry is found again by it."""
    return torch.arange(num_blocks, device="cpu")


def block_slots(blocks: Tensor, num_blocks: int, device: torch.device) -> Tensor:
    """int64 ``[num_blocks + 1]`` on ``device``: the slot of each global block in ``blocks``, -1 where it is not there.

    The extra last entry is the block that list padding points to, which never is there.
    """
    slots = torch.full((num_blocks + 1,), -1, device="cpu")
    slots[blocks] = torch.arange(blocks.numel(), device="cpu")
    return to_device(slots, device)
