"""The blocks of some ranks as tensors made once, so that what is made of them is found again by their identity."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensors import cached_tensors
from .sequence_layout import SequenceLayout


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
