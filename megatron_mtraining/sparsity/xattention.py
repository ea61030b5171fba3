"""Selection of XAttention (arXiv 2503.16428): blocks of keys by the mass of their antidiagonals.

``stride`` neighbouring tokens form a group. The score of a group of queries and one of keys adds up the products along
the antidiagonal, the first query with the last key and so on; a softmax over the groups of keys, causal by groups, is
the estimated attention. Each query block keeps its own key block and then, from the greatest on, those that it takes
until their share of the mass reaches the threshold.

Two ways lead to the mass, each the same for every number of ranks and every layout: exact sums in float64
(``antidiagonal_exact.py``), which say what is right, and products on tensor cores (``antidiagonal_tiles.py``), which a
GPU takes for bfloat16 and float16.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from ..config import MTrainingConfig
from ..layout import SequenceLayout
from ..transport import Group
from ..types import AttentionIndex
from . import antidiagonal_exact, antidiagonal_tiles
from .block_lists import ListBuilder, rows_of
from .opening import open_selection


@torch.no_grad()
def select_xattention(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    cp_group: Group | None = None,
    cu_seqlens: Tensor | None = None,
    num_valid: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> AttentionIndex:
    """Chooses blocks of ``config.xattention_block`` keys for every query block and head.

    A query block is one block of the layout. It speaks for the document of its first token; rows of later documents
    begin inside it, and see its own key block, which is always kept. A group of queries counts for the document of
    its first token, a group of keys for that of its last, and tokens of another document in it as zeros. Documents of
    up to ``config.dense_below`` tokens keep all blocks. Padding counts as zeros, as what lies behind the end does, and
    a query block of padding alone keeps its own key block.

    With bfloat16 or float16 on a GPU the mass comes from tensor cores, with sums in float32, unless ``config.backend``
    is ``reference``: what decides a chunk may then lie within that rounding.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``; this rank's tokens when ``layout`` is given.
        key: ``[batch, seq, num_kv_heads, head_dim]``, likewise.
        config: block, stride, threshold and block size.
        softmax_scale: the attention's own; default ``head_dim ** -0.5``.
        layout: which rank holds which tokens; given together with ``cp_group``.
        cp_group: the context-parallel process group, or any :class:`~megatron_mtraining.transport.base.Transport`.
        cu_seqlens: int32 ``[documents + 1]`` over the global sequence, for packed documents; ``batch`` is then 1.
        num_valid: int32 or int64 ``[batch]``, or with ``cu_seqlens`` ``[documents]``: tokens of each before padding.
            Padding stands at the end and chooses no key: what the others keep is what they would keep without it. A row
            of padding alone keeps distance 0. Default: nothing is padded. Reading it off a device waits for it.
        meanwhile: called once, as soon as ranks have agreed on the plan: what depends on no index may set off there.

    Returns:
        The lists of this rank's query blocks; or where every document is short, the index of all pairs.

    Raises:
        ValueError: an argument does not fit; the sentence names it and the rule.
        RankMismatchError: ranks called with different arguments, or not all of them select.
    """
    call, _ = open_selection(
        "select_xattention",
        query,
        key,
        config,
        softmax_scale=softmax_scale,
        layout=layout,
        cp_group=cp_group,
        cu_seqlens=cu_seqlens,
        num_valid=num_valid,
        meanwhile=meanwhile,
        plan=lambda _: None,
    )
    if call.attends_densely:
        return call.dense_index()
    builder = ListBuilder()
    way = antidiagonal_tiles if antidiagonal_tiles.takes(call) else antidiagonal_exact
    with torch.autocast(query.device.type, enabled=False):
        for row, of_row in rows_of(call):
            for kept in chain.from_iterable(way.kept_chunks(of_row, row, head) for head in range(key.shape[2])):
                builder.add(kept)
    return builder.index(call, chunk_blocks=config.xattention_block // config.block_size)
