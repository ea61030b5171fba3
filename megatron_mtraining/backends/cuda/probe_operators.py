"""The passes of the selection as torch operators: csrc/probe_launch.h.

The tables are those of ``selection/probe_tables.py``.

Legend: ``B`` batch, ``P`` probe rows of all documents, ``S`` local tokens, ``Hq`` and ``Hkv`` heads, ``D`` head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, BLOCK_SIZE, DTYPES
from .params import Fields, aligned, current_stream
from .registration import operator


@operator(mutates_args=("maximum",))
def probe_maximum(
    probe: Tensor,  # [B, P, Hq, D]
    key: Tensor,  # [B, S, Hkv, D]
    documents: Tensor,
    row_tiles: Tensor,
    key_tiles: Tensor,
    positions: Tensor,
    most_row_tiles: int,
    mass_blocks: int,
    softmax_scale: float,
    maximum: Tensor,  # float32 [B * Hq, P]
) -> None:
    """Raises ``maximum`` to the largest ``query . key`` of each row."""
    key = aligned(key)
    tables = (documents, row_tiles, key_tiles, positions)
    scored = _of_scores(probe, key, tables, most_row_tiles, mass_blocks, softmax_scale)
    params = _C.ProbeParams(**scored, end_lane=maximum.shape[0], maximum=maximum)
    _launch(key.device, params, _C.ProbePass.maximum)


@operator(mutates_args=("total",))
def probe_total(
    probe: Tensor,
    key: Tensor,
    documents: Tensor,
    row_tiles: Tensor,
    key_tiles: Tensor,
    positions: Tensor,
    most_row_tiles: int,
    mass_blocks: int,
    softmax_scale: float,
    maximum: Tensor,  # float32 [B * Hq, P], over the keys of all ranks
    total: Tensor,  # int64 [B * Hq, P]
) -> None:
    """Adds each row's ``exp(score - maximum)`` to ``total``, in units of 2**-38: exact sums, in any order the same."""
    key = aligned(key)
    tables = (documents, row_tiles, key_tiles, positions)
    scored = _of_scores(probe, key, tables, most_row_tiles, mass_blocks, softmax_scale)
    params = _C.ProbeParams(**scored, end_lane=maximum.shape[0], maximum=maximum, total=total)
    _launch(key.device, params, _C.ProbePass.total)


@operator(mutates_args=("mass",))
def probe_mass(
    probe: Tensor,
    key: Tensor,
    documents: Tensor,
    row_tiles: Tensor,
    key_tiles: Tensor,
    positions: Tensor,
    most_row_tiles: int,
    mass_blocks: int,
    softmax_scale: float,
    maximum: Tensor,
    total: Tensor,  # over the keys of all ranks
    mass: Tensor,  # float32 [heads_per_list, ranks, lists_per_rank * mass_blocks * 64]
    first_lane: int,
    end_lane: int,
    lists_per_rank: int,
    sink_tokens: int,
    local_blocks: int,
) -> None:
    """The mean probability of each key, by row group, for lanes ``first_lane`` to ``end_lane - 1``.

    These are query heads; ``heads_per_list`` neighbours, whole lists of them, come to stand apart, each to be added up.
    """
    key = aligned(key)
    tables = (documents, row_tiles, key_tiles, positions)
    heads_per_list, num_ranks, _ = mass.shape
    params = _C.ProbeParams(
        **_of_scores(probe, key, tables, most_row_tiles, mass_blocks, softmax_scale),
        maximum=maximum,
        total=total,
        mass=mass,
        heads_per_list=heads_per_list,
        num_ranks=num_ranks,
        first_lane=first_lane,
        end_lane=end_lane,
        lists_per_rank=lists_per_rank,
        sink_tokens=sink_tokens,
        local_blocks=local_blocks,
    )
    _launch(key.device, params, _C.ProbePass.mass)


@operator(mutates_args=("lists",))
def choose_by_budget(
    mass: Tensor,  # float32 [ranks, lists_per_rank * mass_blocks * 64]
    documents: Tensor,
    group_blocks: Tensor,
    block_order: Tensor,
    lists: Tensor,  # int32 [documents, ranked lists, vertical_width + 1 + slash_width + 1]
    lists_per_rank: int,
    mass_blocks: int,
    most_blocks: int,
    seq_len: int,
    vertical_width: int,
    slash_width: int,
    sink_tokens: int,
    local_blocks: int,
    max_vertical: int,
    max_slash: int,
    slash_run_length: int,
    vertical_top_p: float,
    slash_top_p: float,
) -> None:
    """Verticals, then slashes from the mass that they leave: the ranked lists and their counts."""
    num_documents, num_ranked, order_blocks = lists.shape[0], lists.shape[1], block_order.numel()
    columns = mass.new_empty(num_ranked, order_blocks, BLOCK_SIZE)
    distances = mass.new_empty(num_ranked, order_blocks)
    verticals = lists.new_empty(num_documents, num_ranked, 2)
    params = _C.ProbeParams(
        device=mass.get_device(),
        num_documents=num_documents,
        num_ranked=num_ranked,
        lists_per_rank=lists_per_rank,
        mass_blocks=mass_blocks,
        most_blocks=most_blocks,
        order_blocks=order_blocks,
        seq_len=seq_len,
        num_blocks=-(-seq_len // BLOCK_SIZE),
        vertical_width=vertical_width,
        slash_width=slash_width,
        sink_tokens=sink_tokens,
        local_blocks=local_blocks,
        max_vertical=max_vertical,
        max_slash=max_slash,
        slash_run_length=slash_run_length,
        vertical_top_p=vertical_top_p,
        slash_top_p=slash_top_p,
        mass=mass,
        columns=columns,
        distances=distances,
        verticals=verticals,
        lists=lists,
        list_stride_document=lists.stride(0),
        list_stride_lane=lists.stride(1),
        documents=documents,
        group_blocks=group_blocks,
        block_order=block_order,
    )
    steps = (_C.ProbePass.columns, _C.ProbePass.verticals, _C.ProbePass.distances, _C.ProbePass.slashes)
    _launch(mass.device, params, *steps)


def _of_scores(
    probe: Tensor, key: Tensor, tables: tuple[Tensor, ...], most_row_tiles: int, mass_blocks: int, softmax_scale: float
) -> Fields:
    """What every pass over scores reads."""
    documents, row_tiles, key_tiles, positions = tables
    _, num_probe_rows, num_heads, head_dim = probe.shape
    return {
        "device": key.get_device(),
        "dtype": DTYPES[key.dtype],
        "head_dim": head_dim,
        "num_heads": num_heads,
        "num_kv_heads": key.shape[2],
        "num_probe_rows": num_probe_rows,
        "num_documents": documents.shape[0],
        "num_key_tiles": key_tiles.shape[0],
        "most_row_tiles": most_row_tiles,
        "mass_blocks": mass_blocks,
        "softmax_scale": softmax_scale,
        "probe": probe,
        "key": key,
        "documents": documents,
        "row_tiles": row_tiles,
        "key_tiles": key_tiles,
        "positions": positions,
    }


def _launch(device: torch.device, params: _C.ProbeParams, *steps: _C.ProbePass) -> None:
    """Runs passes on the current stream."""
    with torch.cuda.device(device.index):
        stream = current_stream(device.index)
        for step in steps:
            _C.probe_launch(step, params, stream)
