"""The oracle's lists for whole calls, and the lists of an index."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.selection.naive import Lists, naive_selection
from megatron_mtraining.types import VerticalSlashIndex


def brute_force(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> list[Lists]:
    """What ``select`` must choose."""
    batch, seq_len = query.shape[:2]
    rows = [(row, 0, seq_len) for row in range(batch)]
    spans = rows if cu_seqlens is None else [(0, *span) for span in pairwise(cu_seqlens.tolist())]
    return naive_selection(query, key, config, spans=spans, softmax_scale=softmax_scale)


def lists_of(index: VerticalSlashIndex, *, seq_len: int) -> list[Lists]:
    """The lists of an index, once its padding has been checked."""
    num_blocks = -(-seq_len // index.block_size)
    result: list[Lists] = []
    for row in range(index.rows):
        result.append([])
        for head in range(index.num_lists):
            lists = []
            for table, count, padding in (
                (index.vertical, index.num_vertical, seq_len),
                (index.slash, index.num_slash, num_blocks),
            ):
                entries, used = table[row, head].tolist(), int(count[row, head])
                assert entries[used:] == [padding] * (len(entries) - used)
                assert entries == sorted(entries) and len(set(entries[:used])) == used
                lists.append(entries[:used])
            result[-1].append((lists[0], lists[1]))
    return result
