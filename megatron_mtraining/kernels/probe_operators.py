"""The passes of the selection as torch operators: csrc/probe_launch.h.

The tables are those of ``sparsity/probe_tables.py``.

Legend: ``B`` batch, ``P`` probe rows of all documents, ``S`` local tokens, ``Hq`` and ``Hkv`` heads, ``D`` head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, BLOCK_SIZE, DTYPES
from .params import aligned, current_stream, rows


@torch.library.custom_op("mtraining::probe_maximum", mutates_args=("maximum",), device_types="cuda")
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
    params = _score_params(probe, key, tables, most_row_tiles, mass_blocks, softmax_scale)
    params.maximum = maximum.data_ptr()
    _launch(_C.ProbePass.maximum, params, key.device)


@torch.library.custom_op("mtraining::probe_total", mutates_args=("total",), device_types="cuda")
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
    params = _score_params(probe, key, tables, most_row_tiles, mass_blocks, softmax_scale)
    params.maximum, params.total = maximum.data_ptr(), total.data_ptr()
    _launch(_C.ProbePass.total, params, key.device)


@torch.library.custom_op("mtraining::probe_mass", mutates_args=("mass",), device_types="cuda")
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
    params = _score_params(probe, key, tables, most_row_tiles, mass_blocks, softmax_scale)
    params.maximum, params.total, params.mass = maximum.data_ptr(), total.data_ptr(), mass.data_ptr()
    params.heads_per_list, params.num_ranks = mass.shape[:2]
    params.first_lane, params.end_lane, params.lists_per_rank = first_lane, end_lane, lists_per_rank
    params.sink_tokens, params.local_blocks = sink_tokens, local_blocks
    _launch(_C.ProbePass.mass, params, key.device)


@torch.library.custom_op("mtraining::choose_by_budget", mutates_args=("lists",), device_types="cuda")
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
    params = _C.ProbeParams()
    params.device, params.num_documents, params.num_ranked = mass.device.index, num_documents, num_ranked
    params.lists_per_rank, params.mass_blocks, params.most_blocks = lists_per_rank, mass_blocks, most_blocks
    params.order_blocks = order_blocks
    params.seq_len, params.num_blocks = seq_len, -(-seq_len // BLOCK_SIZE)
    params.vertical_width, params.slash_width = vertical_width, slash_width
    params.sink_tokens, params.local_blocks = sink_tokens, local_blocks
    params.max_vertical, params.max_slash, params.slash_run_length = max_vertical, max_slash, slash_run_length
    params.vertical_top_p, params.slash_top_p = vertical_top_p, slash_top_p
    params.mass, params.columns, params.distances = mass.data_ptr(), columns.data_ptr(), distances.data_ptr()
    params.verticals, params.lists = verticals.data_ptr(), lists.data_ptr()
    params.list_stride_document, params.list_stride_lane = lists.stride(0), lists.stride(1)
    params.documents, params.group_blocks = documents.data_ptr(), group_blocks.data_ptr()
    params.block_order = block_order.data_ptr()
    for step in (_C.ProbePass.columns, _C.ProbePass.verticals, _C.ProbePass.distances, _C.ProbePass.slashes):
        _launch(step, params, mass.device)


def _score_params(
    probe: Tensor, key: Tensor, tables: tuple[Tensor, ...], most_row_tiles: int, mass_blocks: int, softmax_scale: float
) -> _C.ProbeParams:
    """The fields that every pass over scores reads; it takes all lanes."""
    documents, row_tiles, key_tiles, positions = tables
    params = _C.ProbeParams()
    params.device, params.dtype = key.device.index, DTYPES[key.dtype]
    _, params.num_probe_rows, params.num_heads, params.head_dim = probe.shape
    params.num_kv_heads = key.shape[2]
    params.end_lane = probe.shape[0] * probe.shape[2]
    params.num_documents, params.num_key_tiles = documents.shape[0], key_tiles.shape[0]
    params.most_row_tiles, params.mass_blocks = most_row_tiles, mass_blocks
    params.softmax_scale = softmax_scale
    params.probe, params.key = rows(probe), rows(key)
    params.documents, params.row_tiles = documents.data_ptr(), row_tiles.data_ptr()
    params.key_tiles, params.positions = key_tiles.data_ptr(), positions.data_ptr()
    return params


def _launch(step: _C.ProbePass, params: _C.ProbeParams, device: torch.device) -> None:
    """Runs a pass on the current stream."""
    with torch.cuda.device(device):
        _C.probe_launch(step, params, current_stream(device))


def _nothing(*args: object) -> None:
    """What the operators do to fake tensors: what they fill keeps shape and dtype."""


for _operator in (probe_maximum, probe_total, probe_mass, choose_by_budget):
    _operator.register_fake(_nothing)
