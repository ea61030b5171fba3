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

_TOP_P, _COST = 0, 1
"""``ProbeBudget`` of csrc/probe_params.h."""


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
        **scored, end_head=part_exponents.shape[1], part_exponents=part_exponents, part_sums=part_sums
    )
    _launch_scores(family, key.device, params, _C.ProbePass.sums)


@operator(mutates_args=("sums",))
def merge_sums(part_exponents: Tensor, part_sums: Tensor, exponents: Tensor, sums: Tensor) -> None:
    """Merge all parts' ``sums``, int64 ``[4, B * Hq, P]``, to ``exponents`` ``[B * Hq, P]``, no smaller than theirs."""
    params = _C.ProbeParams(**_of_parts(part_exponents, part_sums), exponents=exponents, sums=sums)
    _launch(sums.device, params, _C.ProbePass.merge)


@operator(mutates_args=("weights",))
def weights_of_parts(
    part_exponents: Tensor, part_sums: Tensor, row_tiles: Tensor, positions: Tensor, weights: Tensor
) -> None:
    """Compute what :func:`probe_weights` computes, on one rank at once from all parts."""
    params = _C.ProbeParams(
        **_of_parts(part_exponents, part_sums), row_tiles=row_tiles, positions=positions, weights=weights
    )
    _launch(weights.device, params, _C.ProbePass.merge)


@operator(mutates_args=("weights",))
def probe_weights(exponents: Tensor, sums: Tensor, row_tiles: Tensor, positions: Tensor, weights: Tensor) -> None:
    """Compute ``weights`` float32 ``[B * Hq, P, 2]`` from the sums over the keys of all ranks."""
    num_heads, num_probe_rows = exponents.shape
    params = _C.ProbeParams(
        device=sums.get_device(),
        batch=1,
        num_heads=num_heads,
        num_probe_rows=num_probe_rows,
        exponents=exponents,
        sums=sums,
        row_tiles=row_tiles,
        positions=positions,
        weights=weights,
    )
    _launch(sums.device, params, _C.ProbePass.weights)


@operator(mutates_args=("mass", "distances"))
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
    mass: Tensor,  # float32 [ranks, halves, lists_per_rank * mass_blocks * 64]
    distances: Tensor,  # int64 [ranks * lists_per_rank, blocks of all documents]
    heads_per_list: int,
    first_head: int,
    end_head: int,
    lists_per_rank: int,
    sink_tokens: int,
    local_blocks: int,
    slash_run_length: int,
) -> None:
    """Compute the mean probability of each key over a document's rows, for heads ``first_head`` to ``end_head - 1``.

    With two halves each has its share of it. Heads are counted over batch rows. The mass of ``heads_per_list``
    neighbours, of whole lists, is added up. It is added to ``distances`` too, run by run, in units of 2**-54.
    """
    scored = _of_scores(
        probe, aligned(key), (documents, row_tiles, key_tiles, positions, unit_blocks),
        (most_row_tiles, most_key_tiles, mass_blocks, num_splits), softmax_scale,
    )  # fmt: skip
    params = _C.ProbeParams(
        **scored,
        weights=weights,
        mass=mass,
        num_halves=mass.shape[1],
        distance_sums=distances,
        order_blocks=distances.shape[1],
        heads_per_list=heads_per_list,
        num_ranks=mass.shape[0],
        first_head=first_head,
        end_head=end_head,
        lists_per_rank=lists_per_rank,
        sink_tokens=sink_tokens,
        local_blocks=local_blocks,
        slash_run_length=slash_run_length,
    )
    _launch_scores(family, key.device, params, _C.ProbePass.mass)


@operator(mutates_args=("lists", "rates", "verticals", "column_choices"))
def choose_verticals(
    mass: Tensor,  # float32 [ranks, halves, lists_per_rank * mass_blocks * 64]
    distances: Tensor,  # int64 [chosen lists, blocks of all documents], of all keys
    documents: Tensor,
    block_order: Tensor,
    visible_rows: Tensor,
    lists: Tensor,  # int32 [E, chosen lists, vertical_width + 1 + slash_width + 1]
    rates: Tensor | None,  # float32 [E, chosen lists, vertical_width + slash_width]
    column_choices: Tensor | None,  # int64 [E, lists_per_rank, 2]
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
    give_up: int,
) -> None:
    """Choose the vertical lists and their counts, and write the threshold of each.

    With ``column_choices`` columns and distances compete by mass for each pair, until all mass but ``give_up`` is
    reached, and the mass that is still needed and the pairs of the columns are written there.
    """
    of_lists = _of_lists(lists, rates, lists_per_rank, mass_blocks, most_blocks, seq_len, vertical_width, slash_width)
    params = _C.ProbeParams(
        **of_lists,
        **_of_budget(column_choices),
        order_blocks=block_order.numel(),
        sink_tokens=sink_tokens,
        local_blocks=local_blocks,
        max_vertical=max_vertical,
        vertical_top_p=vertical_top_p,
        give_up=give_up,
        mass=mass,
        num_halves=mass.shape[1],
        distance_sums=distances,
        verticals=verticals,
        documents=documents,
        block_order=block_order,
        visible_rows=visible_rows,
    )
    _launch(mass.device, params, _C.ProbePass.verticals)


@operator(mutates_args=("column_distances",))
def probe_columns(
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
    mass: Tensor,  # float32 [ranks, halves, lists_per_rank * mass_blocks * 64]: of this rank's keys
    thresholds: Tensor,  # int32 [ranks, E, lists_per_rank, 2]: all verticals
    column_distances: Tensor,  # int64 [ranks * lists_per_rank, blocks of all documents]
    vertical_width: int,
    visible_rows: Tensor | None,  # where columns compete by mass for each pair
    heads_per_list: int,
    first_head: int,
    end_head: int,
    lists_per_rank: int,
    sink_tokens: int,
    local_blocks: int,
    slash_run_length: int,
) -> None:
    """Add the mass of this rank's keys that are verticals to ``column_distances``, as ``probe_mass`` does of all."""
    scored = _of_scores(
        probe, aligned(key), (documents, row_tiles, key_tiles, positions, unit_blocks),
        (most_row_tiles, most_key_tiles, mass_blocks, num_splits), softmax_scale,
    )  # fmt: skip
    lists, width = column_distances.shape[0], min(vertical_width, most_key_tiles * BLOCK_SIZE)
    params = _C.ProbeParams(
        **scored,
        weights=weights,
        mass=mass,
        num_halves=mass.shape[1],
        thresholds=thresholds,
        num_chosen=thresholds.new_zeros(lists, thresholds.shape[1]),
        chosen=thresholds.new_empty(lists, thresholds.shape[1], width, 2),
        chosen_width=width,
        distance_sums=column_distances,
        budget=_TOP_P if visible_rows is None else _COST,
        visible_rows=visible_rows,
        order_blocks=column_distances.shape[1],
        heads_per_list=heads_per_list,
        num_ranks=thresholds.shape[0],
        first_head=first_head,
        end_head=end_head,
        lists_per_rank=lists_per_rank,
        sink_tokens=sink_tokens,
        local_blocks=local_blocks,
        slash_run_length=slash_run_length,
    )
    _launch(key.device, params, _C.ProbePass.chosen)
    _launch_scores(family, key.device, params, _C.ProbePass.columns)


@operator(mutates_args=("lists", "rates", "pairs"))
def choose_slashes(
    distances: Tensor,  # int64 [chosen lists, blocks of all documents], over the keys of all ranks
    column_distances: Tensor,  # likewise, of the verticals alone
    documents: Tensor,
    block_order: Tensor,
    visible_rows: Tensor,
    lists: Tensor,
    rates: Tensor | None,
    column_choices: Tensor | None,
    lists_per_rank: int,
    mass_blocks: int,
    most_blocks: int,
    seq_len: int,
    vertical_width: int,
    slash_width: int,
    pairs: Tensor | None,  # int64 [E, chosen lists]
    local_blocks: int,
    max_slash: int,
    slash_run_length: int,
    slash_top_p: float,
    dense_above: float,
) -> None:
    """Choose the slash lists and their counts, by what the verticals leave of the distances.

    With ``column_choices`` distances are chosen by mass for each pair. A list of more than ``dense_above`` of the
    causal pairs becomes dense, or with ``pairs`` none does and the pairs of each are written there.
    """
    of_lists = _of_lists(lists, rates, lists_per_rank, mass_blocks, most_blocks, seq_len, vertical_width, slash_width)
    params = _C.ProbeParams(
        **of_lists,
        **_of_budget(column_choices),
        order_blocks=block_order.numel(),
        local_blocks=local_blocks,
        max_slash=max_slash,
        slash_run_length=slash_run_length,
        slash_top_p=slash_top_p,
        dense_above=dense_above,
        distance_sums=distances,
        column_sums=column_distances,
        pairs=pairs,
        pair_stride_document=0 if pairs is None else pairs.stride(0),
        documents=documents,
        visible_rows=visible_rows,
    )
    _launch(lists.device, params, _C.ProbePass.slashes)


def _of_parts(part_exponents: Tensor, part_sums: Tensor) -> Fields:
    """Return the fields of the parts of the rows' sums."""
    num_splits, num_heads, num_probe_rows = part_exponents.shape
    return {
        "device": part_sums.get_device(),
        "batch": 1,
        "num_heads": num_heads,
        "num_probe_rows": num_probe_rows,
        "num_splits": num_splits,
        "part_exponents": part_exponents,
        "part_sums": part_sums,
    }


def _of_budget(column_choices: Tensor | None) -> Fields:
    """Return the fields of the budget: cost where there are ``column_choices``."""
    return {"budget": _TOP_P if column_choices is None else _COST, "column_choices": column_choices}


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
    rates: Tensor | None,
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
        "list_stride": lists.stride(1),
        "rates": rates,
        "rate_stride_document": 0 if rates is None else rates.stride(0),
        "rate_stride": 0 if rates is None else rates.stride(1),
    }


def _launch_scores(family: str, device: torch.device, params: _C.ProbeParams, probe_pass: _C.ProbePass) -> None:
    """Run a pass over scores on the current stream."""
    launch = _C.sm90_probe_launch if family == "sm90" else _C.sm80_probe_launch
    with torch.cuda.device(device.index):
        launch(probe_pass, params, current_stream(device.index))


def _launch(device: torch.device, params: _C.ProbeParams, probe_pass: _C.ProbePass) -> None:
    """Run another pass on the current stream."""
    with torch.cuda.device(device.index):
        _C.probe_launch(probe_pass, params, current_stream(device.index))
