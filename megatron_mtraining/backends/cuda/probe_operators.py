"""The passes of the selection as torch operators: csrc/probe_launch.h.

The tables are those of ``selection/probe_tables.py``; those over scores take them first, and the family last.

Legend: ``B`` batch, ``P`` probe rows of all documents with their padding, ``S`` local tokens, ``Hq`` and ``Hkv`` heads,
``D`` head_dim, ``E`` documents, ``N`` splits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, BLOCK_SIZE, DTYPES
from .params import Fields, aligned, current_stream
from .registration import operator


@operator(mutates_args=("part_exponents", "part_sums"))
def probe_sums(
    probe: Tensor,  # [B, P, Hq, D]
    key: Tensor,  # [B, S, Hkv, D]
    documents: Tensor,
    row_tiles: Tensor,
    key_tiles: Tensor,
    positions: Tensor,
    unit_blocks: Tensor,
    most_row_tiles: int,
    most_key_tiles: int,
    mass_blocks: int,
    num_splits: int,
    softmax_scale: float,
    family: str,
    part_exponents: Tensor,  # int32 [N, B * Hq, P]
    part_sums: Tensor,  # int64 [4, N, B * Hq, P]
) -> None:
    """Compute each row's sum of ``exp(score)`` over this rank's keys, part by part: exact, see csrc/probe_sums.cuh."""
    scored = _of_scores(
        probe, aligned(key), (documents, row_tiles, key_tiles, positions, unit_blocks),
        (most_row_tiles, most_key_tiles, mass_blocks, num_splits), softmax_scale,
    )  # fmt: skip
    params = _C.ProbeParams(
        **scored, end_lane=part_exponents.shape[1], part_exponents=part_exponents, part_sums=part_sums
    )
    _launch_scores(family, key.device, params, _C.ProbePass.sums)


@operator(mutates_args=("sums",))
def merge_sums(part_exponents: Tensor, part_sums: Tensor, exponents: Tensor, sums: Tensor) -> None:
    """Merge all parts' ``sums``, int64 ``[4, B * Hq, P]``, to ``exponents`` ``[B * Hq, P]``, no smaller than theirs."""
    num_splits, num_lanes, num_probe_rows = part_exponents.shape
    params = _C.ProbeParams(
        device=sums.get_device(),
        batch=1,
        num_heads=num_lanes,
        num_probe_rows=num_probe_rows,
        num_splits=num_splits,
        part_exponents=part_exponents,
        part_sums=part_sums,
        exponents=exponents,
        sums=sums,
    )
    _launch(sums.device, params, _C.ProbePass.merge)


@operator(mutates_args=("weights",))
def probe_weights(exponents: Tensor, sums: Tensor, row_tiles: Tensor, positions: Tensor, weights: Tensor) -> None:
    """Compute ``weights`` float32 ``[B * Hq, P, 2]`` from the sums over the keys of all ranks."""
    num_lanes, num_probe_rows = exponents.shape
    params = _C.ProbeParams(
        device=sums.get_device(),
        batch=1,
        num_heads=num_lanes,
        num_probe_rows=num_probe_rows,
        exponents=exponents,
        sums=sums,
        row_tiles=row_tiles,
        positions=positions,
        weights=weights,
    )
    _launch(sums.device, params, _C.ProbePass.weights)


@operator(mutates_args=("mass",))
def probe_mass(
    probe: Tensor,
    key: Tensor,
    documents: Tensor,
    row_tiles: Tensor,
    key_tiles: Tensor,
    positions: Tensor,
    unit_blocks: Tensor,
    most_row_tiles: int,
    most_key_tiles: int,
    mass_blocks: int,
    num_splits: int,
    softmax_scale: float,
    family: str,
    weights: Tensor,
    mass: Tensor,  # float32 [heads_per_list, ranks, lists_per_rank * mass_blocks * 64]
    first_lane: int,
    end_lane: int,
    lists_per_rank: int,
    sink_tokens: int,
    local_blocks: int,
) -> None:
    """Compute the mean probability of each key over a document's rows, for lanes ``first_lane`` to ``end_lane - 1``.

    These are query heads; ``heads_per_list`` neighbours, whole lists of them, come to stand apart, each to be added up.
    """
    scored = _of_scores(
        probe, aligned(key), (documents, row_tiles, key_tiles, positions, unit_blocks),
        (most_row_tiles, most_key_tiles, mass_blocks, num_splits), softmax_scale,
    )  # fmt: skip
    heads_per_list, num_ranks, _ = mass.shape
    params = _C.ProbeParams(
        **scored,
        weights=weights,
        mass=mass,
        heads_per_list=heads_per_list,
        num_ranks=num_ranks,
        first_lane=first_lane,
        end_lane=end_lane,
        lists_per_rank=lists_per_rank,
        sink_tokens=sink_tokens,
        local_blocks=local_blocks,
    )
    _launch_scores(family, key.device, params, _C.ProbePass.mass)


@operator(mutates_args=("lists", "verticals"))
def choose_verticals(
    mass: Tensor,  # float32 [ranks, lists_per_rank * mass_blocks * 64]
    documents: Tensor,
    block_order: Tensor,
    lists: Tensor,  # int32 [E, ranked lists, vertical_width + 1 + slash_width + 1]
    lists_per_rank: int,
    mass_blocks: int,
    most_blocks: int,
    seq_len: int,
    vertical_width: int,
    slash_width: int,
    verticals: Tensor,  # int32 [E, lists_per_rank, 2]
    sink_tokens: int,
    local_blocks: int,
    max_vertical: int,
    vertical_top_p: float,
) -> None:
    """Choose the vertical lists and their counts, and report the least mass that each took."""
    columns = mass.new_empty(lists.shape[1], block_order.numel(), BLOCK_SIZE)
    ranked = _of_lists(lists, lists_per_rank, mass_blocks, most_blocks, seq_len, vertical_width, slash_width)
    params = _C.ProbeParams(
        **ranked,
        order_blocks=block_order.numel(),
        sink_tokens=sink_tokens,
        local_blocks=local_blocks,
        max_vertical=max_vertical,
        vertical_top_p=vertical_top_p,
        mass=mass,
        columns=columns,
        verticals=verticals,
        documents=documents,
        block_order=block_order,
    )
    _launch(mass.device, params, _C.ProbePass.columns, _C.ProbePass.verticals)


@operator(mutates_args=("distances",))
def probe_distances(
    probe: Tensor,
    key: Tensor,
    documents: Tensor,
    row_tiles: Tensor,
    key_tiles: Tensor,
    positions: Tensor,
    unit_blocks: Tensor,
    most_row_tiles: int,
    most_key_tiles: int,
    mass_blocks: int,
    num_splits: int,
    softmax_scale: float,
    family: str,
    weights: Tensor,
    mass: Tensor,  # float32 [ranks, lists_per_rank * mass_blocks * 64]: of this rank's keys
    thresholds: Tensor,  # int32 [ranks, E, lists_per_rank, 2]: all verticals
    distances: Tensor,  # int64 [ranks * lists_per_rank, blocks of all documents]
    heads_per_list: int,
    first_lane: int,
    end_lane: int,
    lists_per_rank: int,
    sink_tokens: int,
    local_blocks: int,
    slash_run_length: int,
) -> None:
    """Add the mass of this rank's keys that are no vertical to ``distances``, run by run, in units of 2**-54."""
    scored = _of_scores(
        probe, aligned(key), (documents, row_tiles, key_tiles, positions, unit_blocks),
        (most_row_tiles, most_key_tiles, mass_blocks, num_splits), softmax_scale,
    )  # fmt: skip
    left = distances.new_empty(distances.shape[0], mass_blocks)
    params = _C.ProbeParams(
        **scored,
        weights=weights,
        mass=mass,
        thresholds=thresholds,
        left=left,
        distance_sums=distances,
        order_blocks=distances.shape[1],
        heads_per_list=heads_per_list,
        num_ranks=thresholds.shape[0],
        first_lane=first_lane,
        end_lane=end_lane,
        lists_per_rank=lists_per_rank,
        sink_tokens=sink_tokens,
        local_blocks=local_blocks,
        slash_run_length=slash_run_length,
    )
    _launch(key.device, params, _C.ProbePass.left)
    _launch_scores(family, key.device, params, _C.ProbePass.distances)


@operator(mutates_args=("lists",))
def choose_slashes(
    distances: Tensor,  # int64 [ranked lists, blocks of all documents], over the keys of all ranks
    documents: Tensor,
    block_order: Tensor,
    lists: Tensor,
    lists_per_rank: int,
    mass_blocks: int,
    most_blocks: int,
    seq_len: int,
    vertical_width: int,
    slash_width: int,
    local_blocks: int,
    max_slash: int,
    slash_run_length: int,
    slash_top_p: float,
) -> None:
    """Choose the slash lists and their counts."""
    ranked = _of_lists(lists, lists_per_rank, mass_blocks, most_blocks, seq_len, vertical_width, slash_width)
    params = _C.ProbeParams(
        **ranked,
        order_blocks=block_order.numel(),
        local_blocks=local_blocks,
        max_slash=max_slash,
        slash_run_length=slash_run_length,
        slash_top_p=slash_top_p,
        distance_sums=distances,
        distances=torch.empty_like(distances, dtype=torch.float32),
        documents=documents,
    )
    _launch(lists.device, params, _C.ProbePass.slashes)


def _of_scores(
    probe: Tensor, key: Tensor, tables: tuple[Tensor, ...], sizes: tuple[int, ...], softmax_scale: float
) -> Fields:
    """Return the fields that every pass over scores reads."""
    documents, row_tiles, key_tiles, positions, unit_blocks = tables
    most_row_tiles, most_key_tiles, mass_blocks, num_splits = sizes
    batch, num_probe_rows, num_heads, head_dim = probe.shape
    return {
        "device": key.get_device(),
        "dtype": DTYPES[key.dtype],
        "head_dim": head_dim,
        "batch": batch,
        "num_heads": num_heads,
        "num_kv_heads": key.shape[2],
        "num_probe_rows": num_probe_rows,
        "num_keys": key.shape[1],
        "num_documents": documents.shape[0],
        "num_key_tiles": key_tiles.shape[0],
        "most_row_tiles": most_row_tiles,
        "most_key_tiles": most_key_tiles,
        "mass_blocks": mass_blocks,
        "num_splits": num_splits,
        "softmax_scale": softmax_scale,
        "probe": probe,
        "key": key,
        "documents": documents,
        "row_tiles": row_tiles,
        "key_tiles": key_tiles,
        "positions": positions,
        "unit_blocks": unit_blocks,
    }


def _of_lists(
    lists: Tensor,
    lists_per_rank: int,
    mass_blocks: int,
    most_blocks: int,
    seq_len: int,
    vertical_width: int,
    slash_width: int,
) -> Fields:
    """Return the fields that both choices write, and their sizes."""
    return {
        "device": lists.get_device(),
        "num_documents": lists.shape[0],
        "num_ranked": lists.shape[1],
        "lists_per_rank": lists_per_rank,
        "mass_blocks": mass_blocks,
        "most_blocks": most_blocks,
        "seq_len": seq_len,
        "num_blocks": -(-seq_len // BLOCK_SIZE),
        "vertical_width": vertical_width,
        "slash_width": slash_width,
        "lists": lists,
        "list_stride_document": lists.stride(0),
        "list_stride_lane": lists.stride(1),
    }


def _launch_scores(family: str, device: torch.device, params: _C.ProbeParams, step: _C.ProbePass) -> None:
    """Run a pass over scores on the current stream."""
    launch = _C.sm90_probe_launch if family == "sm90" else _C.sm80_probe_launch
    with torch.cuda.device(device.index):
        launch(step, params, current_stream(device.index))


def _launch(device: torch.device, params: _C.ProbeParams, *steps: _C.ProbePass) -> None:
    """Run other passes on the current stream."""
    with torch.cuda.device(device.index):
        stream = current_stream(device.index)
        for step in steps:
            _C.probe_launch(step, params, stream)
