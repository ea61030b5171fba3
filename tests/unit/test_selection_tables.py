"""What the selection kernels are told: tables that agree with the plan on every rank, and which calls are theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.backends import cuda
from megatron_mtraining.config import LAYOUTS, MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.request import AttentionRequest
from megatron_mtraining.selection import fused, vertical_slash
from megatron_mtraining.selection.estimators import SelectionRequest, estimated_documents
from megatron_mtraining.selection.probe_tables import probe_tables
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import RingGroups, SoloTransport
from megatron_mtraining.types import Documents
from tests.layouts import node_size_of

CONFIG = MTrainingConfig.algorithm_1(num_probe_rows=24, num_probe_windows=4, dense_below=2, block_size=8)
COST = MTrainingConfig(num_probe_rows=72, num_probe_windows=12, dense_below=2, block_size=8)
PACK = Documents((0, 9, 9, 70, 71, 200, 288))


def request_of(config, layout, transport, documents=None) -> SelectionRequest:
    """The request of one rank; only shapes matter."""
    query = torch.zeros(1, layout.local_len, 4, 8)
    call = AttentionRequest(
        query=query,
        key=query[:, :, :2],
        value=None,
        config=config,
        index=None,
        layout=layout,
        groups=RingGroups(cp=transport),
        softmax_scale=1.0,
        documents=documents,
        num_valid=None,
    )
    estimated = estimated_documents(config, layout, transport.rank, 1, call.estimated_spans)
    return SelectionRequest.of(call, estimated, (1, 1))


def tables_of_ranks(config, kind, cp_size, documents):
    """Layout, plan and every rank's tables."""
    layout = SequenceLayout(kind, seq_len=288, cp_size=cp_size, block_size=8, node_size=node_size_of(cp_size))

    def body(group):
        request = request_of(config, layout, group, documents)
        return request.estimated, probe_tables(request)

    return layout, RankSimulator(cp_size).run(body)


@pytest.mark.parametrize("documents", [None, PACK], ids=["one", "packed"])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_key_tiles_hold_every_token_once_where_the_block_order_says(kind, cp_size, documents):
    layout, ranks = tables_of_ranks(CONFIG, kind, cp_size, documents)
    for number, document in enumerate(ranks[0][0]):
        seen = []
        for rank, (_, tables) in enumerate(ranks):
            row = tables.documents[number].tolist()
            first_block, num_blocks, first_slot, slots_per_rank = row[2], row[3], row[6], row[7]
            order = tables.block_order[row[11] : row[11] + num_blocks]
            assert row[9] - row[8] <= tables.most_key_tiles
            for slot, block, begin, end in tables.key_tiles[row[8] : row[9]].tolist():
                assert layout.blocks(rank)[slot] == block
                assert order[block - first_block] == rank * slots_per_rank + slot - first_slot
                assert 0 <= slot - first_slot < slots_per_rank and 0 <= begin < end <= 8
                seen += range(block * 8 + begin, block * 8 + end)
        assert sorted(seen) == list(range(document.start, document.stop))


@pytest.mark.parametrize("documents", [None, PACK], ids=["one", "packed"])
@pytest.mark.parametrize("estimator", ["last_window", "probe_windows"])
@pytest.mark.parametrize("window", [24, 100, 264])
def test_row_tiles_hold_every_probe_row_once_in_a_unit_of_its_block(window, estimator, documents):
    config = replace(CONFIG, estimator=estimator, num_probe_rows=window)
    _, [(estimated, tables)] = tables_of_ranks(config, "contiguous", 1, documents)
    first_tile = 0
    for number, document in enumerate(estimated):
        row = tables.documents[number].tolist()
        assert row[4] == first_tile and row[5] <= tables.most_row_tiles
        first_tile += row[5]
        rows = []
        for tile in range(row[4], first_tile):
            padded = tables.positions[tile * 64 : tile * 64 + 64].tolist()
            units = tables.unit_blocks[tile * 8 : tile * 8 + 8].tolist()
            own = [position for position in padded if position >= 0]
            assert tables.row_tiles[tile].tolist() == [own[0], own[-1], max(units), len(document.probe_rows)]
            assert all(
                position in (-1, *own) and position // 8 in (-1, units[i // 8]) for i, position in enumerate(padded)
            )
            rows += own
            seen = tables.seen_key_tiles[number][tile - row[4]]
            blocks = tables.key_tiles[row[8] : row[9], 1].tolist()
            assert seen == sum(block <= own[-1] // 8 for block in blocks)
        assert tuple(rows) == document.probe_rows
    assert tables.num_probe_rows == 64 * first_tile


@pytest.mark.parametrize("target_recall", [0.9, 1.0])
@pytest.mark.parametrize("documents", [None, PACK], ids=["one", "packed"])
def test_either_half_of_a_tile_has_the_rows_of_every_other_query_block(documents, target_recall):
    config = replace(COST, target_recall=target_recall)
    _, [(estimated, tables)] = tables_of_ranks(config, "contiguous", 1, documents)
    assert tables.num_halves == (1 if target_recall == 1 else 2)
    seen_halves = set()
    for document, row in zip(estimated, tables.documents.tolist(), strict=True):
        blocks = sorted({position // 8 for position in document.probe_rows})
        has_halves = target_recall < 1 and len(blocks) >= 8
        seen_halves.add(has_halves)
        assert row[12] == (2 if has_halves else 1)
        rows = []
        for tile in range(row[4], row[4] + row[5]):
            padded = tables.positions[tile * 64 : tile * 64 + 64].tolist()
            units = tables.unit_blocks[tile * 8 : tile * 8 + 8].tolist()
            own = [position for position in padded if position >= 0]
            assert tables.row_tiles[tile].tolist() == [min(own), max(own), max(units), len(document.probe_rows)]
            assert all(
                position in (-1, *own) and position // 8 in (-1, units[i // 8]) for i, position in enumerate(padded)
            )
            rows += own
            if has_halves:
                halves = [[blocks.index(unit) % 2 for unit in each if unit >= 0] for each in (units[:4], units[4:])]
                assert set(halves[0]) <= {0} and set(halves[1]) <= {1}
        assert sorted(rows) == list(document.probe_rows)
        assert has_halves or tuple(rows) == document.probe_rows
    assert seen_halves == ({False} if target_recall == 1 else {True} if documents is None else {True, False})


@pytest.mark.parametrize("documents", [None, PACK], ids=["one", "packed"])
@pytest.mark.parametrize("config", [replace(CONFIG, estimator="probe_windows"), COST], ids=["top_p", "cost"])
def test_the_ranks_hold_every_padded_row_once_and_padding_repeats_the_row_before(config, documents):
    layout, ranks = tables_of_ranks(config, "striped", 3, documents)
    held = {}
    for rank, (_, tables) in enumerate(ranks):
        blocks = layout.blocks(rank)
        for place, local in zip(tables.owned_rows.tolist(), tables.local_rows.tolist(), strict=True):
            assert place not in held
            held[place] = int(blocks[local // 8]) * 8 + local % 8
    before = None
    for place, position in enumerate(ranks[0][1].positions.tolist()):
        before = before if position < 0 else position
        assert held[place] == before
    assert len(held) == ranks[0][1].num_probe_rows


def test_mass_and_order_of_documents_follow_each_other():
    _, ranks = tables_of_ranks(CONFIG, "striped", 3, PACK)
    for estimated, tables in ranks:
        mass_block = order_block = 0
        for document, row in zip(estimated, tables.documents.tolist(), strict=True):
            assert row[10:12] == [mass_block, order_block]
            mass_block += document.slots_per_rank
            order_block += document.num_blocks
        assert tables.mass_blocks == mass_block and tables.block_order.numel() == order_block


@pytest.mark.parametrize("documents", [None, PACK], ids=["one", "packed"])
@pytest.mark.parametrize("estimator", ["last_window", "probe_windows"])
def test_visible_rows_count_the_probe_rows_at_each_distance(estimator, documents):
    _, ranks = tables_of_ranks(replace(CONFIG, estimator=estimator), "striped", 2, documents)
    for estimated, tables in ranks:
        expected = [
            max(1, sum(row // 8 - document.first_block >= distance for row in document.probe_rows))
            for document in estimated
            for distance in range(document.num_blocks)
        ]
        assert tables.visible_rows.tolist() == expected


@pytest.mark.parametrize(
    ("seen", "splits"),
    [
        ((2048,), 64),  # 3 CTAs for the 8 heads of each of 2 key/value heads: three waves of 132
        (tuple(256 * (i + 1) for i in range(8)), 40),
        ((0,), 1),
    ],
)
def test_the_keys_are_cut_so_that_waves_of_ctas_are_full(seen, splits):
    assert fused.best_num_splits((seen,), 8, 2, 1000, "sm90", 132) == splits
    assert fused.best_num_splits((seen,), 8, 2, 1, "sm80", 132) == 1


VERTICAL_RATES = (float("inf"), 5.0, 1.0, 3.0, 0.0)
SLASH_RATES = (float("inf"), 3.0, 2.0, 0.0)


@pytest.mark.parametrize(
    ("most", "pairs", "vertical", "slash"),
    [
        (10**6, 10**6, (0, 10, 20, 30), (0, 2, 3)),
        (0, 700, (0,), (0,)),  # sinks and local blocks alone
        (100 + 640 + 90, 2000, (0, 10), (0,)),
        (100 + 640 + 90 + 70 + 511, 2000, (0, 10, 30), (0,)),
        (100 + 640 + 90 + 70 + 512, 2000, (0, 10, 30), (0, 2)),  # a column before a distance of its rate
        (1111, 1111, (0, 10, 20, 30), (0, 2, 3)),  # overlaps count once in the pairs of a list
    ],
)
def test_lines_of_the_lowest_rates_leave_a_list_of_too_many_pairs(most, pairs, vertical, slash):
    """A document of 100 tokens in 10 blocks of 8: 100 pairs of the sink, 640 of the local blocks."""
    entries = torch.tensor([[0, 10, 20, 30, 100, 4, 0, 2, 3, 13, 3]], dtype=torch.int32)
    rates = torch.tensor([VERTICAL_RATES + SLASH_RATES])
    bounded = fused.without_lowest_rates(
        entries,
        rates,
        torch.tensor([pairs]),
        widths=(5, 4),
        most=torch.tensor([most]),
        stop=torch.tensor(100),
        num_blocks=torch.tensor(10),
        paddings=(100, 13),
        block_size=8,
    )
    expected = [*vertical, *[100] * (5 - len(vertical)), len(vertical), *slash, *[13] * (4 - len(slash)), len(slash)]
    assert bounded.dtype == torch.int32 and bounded[0].tolist() == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"estimator": "probe_windows"}, None),
        ({"backend": "cuda"}, None),
        ({"backend": "reference"}, "The backend is reference."),
        ({"budget": "cost"}, None),
        ({"budget": "cost", "max_density": 0.5}, None),
        ({"budget": "fixed"}, None),
        ({"budget": "top_p_literal"}, "The CUDA kernels do not have the budget top_p_literal."),
        ({"num_probe_rows": 200}, None),
        ({"num_probe_rows": 1024}, None),
        ({"estimator": "probe_windows", "num_probe_rows": 512, "num_probe_windows": 64}, None),
    ],
)
def test_which_calls_are_the_kernels(changes, reason, monkeypatch):
    layout = SequenceLayout("contiguous", seq_len=2000, cp_size=1, block_size=8)
    request = request_of(replace(CONFIG, **changes), layout, SoloTransport())
    assert fused.unsupported_reason(request)  # on a CPU
    monkeypatch.setattr(cuda, "why_unavailable", lambda **case: None)
    assert fused.unsupported_reason(request) is None if reason is None else reason in fused.unsupported_reason(request)


def test_the_first_rank_of_a_host_says_once_why_the_reference_selects(caplog, monkeypatch):
    query = torch.zeros(1, 16, 2, 8)
    caplog.set_level("INFO", logger=vertical_slash.__name__)
    monkeypatch.setenv("RANK", "8")
    for rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        vertical_slash._log_reference.cache_clear()
        for backend in ("reference", "auto", "auto"):
            select(query, query, MTrainingConfig(block_size=8, dense_below=0, backend=backend))
    (message,) = caplog.messages
    assert message.startswith("selection: reference. The CUDA kernels ")
