"""An index whose lists groups of heads share, written out for kernels that read a list for each query head."""

from __future__ import annotations

from torch import Tensor

from ..types import VerticalSlashIndex


def write_out(index: VerticalSlashIndex, packed: Tensor, *, num_heads: int) -> tuple[VerticalSlashIndex, Tensor]:
    """The index and the packed rows ``[2, rows, num_lists, max_v, head_dim]`` with a list for each query head."""
    group = num_heads // index.num_lists
    return index.per_head(num_heads), packed if group == 1 else packed.repeat_interleave(group, dim=2)


def summed_over_groups(grad_packed: Tensor, *, num_lists: int) -> Tensor:
    """Gradients ``[2, rows, num_heads, max_v, head_dim]`` as those of the packed rows that heads share.

    Heads are added in their order, so that the sum repeats bit for bit.
    """
    members = grad_packed.unflatten(2, (num_lists, -1)).unbind(3)
    if len(members) == 1:
        return grad_packed
    total = members[0] + members[1]
    for member in members[2:]:
        total += member
    return total
