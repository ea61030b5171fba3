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

import torch

from ..request import AttentionRequest
from ..types import AttentionIndex, BlockListIndex
from . import antidiagonal_exact, antidiagonal_tiles
from .block_lists import ListBuilder, rows_of
from .dense import every_key


def prepare(request: AttentionRequest) -> Callable[[], Callable[[], AttentionIndex]]:
    """Plan the choice of blocks of ``config.xattention_block`` keys for every query block and head.

    A query block is one block of the layout. It speaks for the document of its first token; rows of later documents
    begin inside it, and see its own key block, which is always kept. A group of queries counts for the document of
    its first token, a group of keys for that of its last, and tokens of another document in it as zeros. Documents of
    up to ``config.dense_below`` tokens keep all blocks. Padding counts as zeros, as what lies behind the end does, and
    a query block of padding alone keeps its own key block.

    With bfloat16 or float16 on a GPU the mass comes from tensor cores, with sums in float32, unless ``config.backend``
    is ``reference``: what decides a chunk may then lie within that rounding.

    The index holds the lists of this rank's query blocks; where every document is short, it is that of all pairs.
    """
    if request.is_short:
        return lambda: lambda: every_key(request)
    return lambda: lambda: _choose(request)


def _choose(request: AttentionRequest) -> BlockListIndex:
    builder = ListBuilder()
    way = antidiagonal_tiles if antidiagonal_tiles.takes(request) else antidiagonal_exact
    with torch.autocast(request.query.device.type, enabled=False):
        for row, of_row in rows_of(request):
            for kv_head in range(request.key.shape[2]):
                for kept in way.kept_chunks(of_row, row, kv_head):
                    builder.add(kept)
    return builder.index(request, chunk_blocks=request.config.xattention_block // request.config.block_size)
