"""What the selection kernels are told: tables that agree with the plan on every rank, and which calls are theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.backends import cuda
from megatron_mtraining.config import LAYOUTS, MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.selection import fused, vertical_slash
from megatron_mtraining.selection.plan import plan_documents
from megatron_mtraining.selection.probe_tables import probe_tables
from megatron_mtraining.selection.task import SelectionTask
from megatron_mtraining.shards import SequenceShards
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import SoloTransport
from megatron_mtraining.types import Documents
from tests.layouts import node_size_of

CONFIG = MTrainingConfig.algorithm_1(num_probe_rows=24, num_probe_windows=4, dense_below=2, block_size=8)
PACK = Documents((0, 9, 9, 70, 71, 200, 288))


def task_of(config, layout, transport, documents=None) -> SelectionTask:
    """The task of one rank; only shapes matter."""
    query = torch.zeros(1, layout.local_len, 4, 8)
    spans = ((0, layout.seq_len),) if documents is None else documents.spans
    return SelectionTask(
        query=query,
        key=query[:, :, :2],
        softmax_scale=1.0,
        config=config,
        shards=SequenceShards(layout, transport),
        spans=spans,
        planned=plan_documents(config, layout, transport.rank, 1, spans),
        widths=(1, 1),
    )


def tables_of_ranks(config, kind, cp_size, documents):
    """Layout, plan and every rank's tables."""
    layout = SequenceLayout(kind, seq_len=288, cp_size=cp_size, block_size=8, node_size=node_size_of(cp_size))

    def body(group):
        task = task_of(config, layout, group, documents)
        return task.planned, probe_tables(task)

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
    _, [(planned, tables)] = tables_of_ranks(config, "contiguous", 1, documents)
    first_tile = 0
    for number, document in enumerate(planned):
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
        assert tuple(rows) == document.probe_rows
    assert tables.num_probe_rows == 64 * first_tile


@pytest.mark.parametrize("documents", [None, PACK], ids=["one", "packed"])
def test_the_ranks_hold_every_padded_row_once_and_padding_repeats_the_row_before(documents):
    config = replace(CONFIG, estimator="probe_windows")
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
    for planned, tables in ranks:
        mass_block = order_block = 0
        for document, row in zip(planned, tables.documents.tolist(), strict=True):
            assert row[10:12] == [mass_block, order_block]
            mass_block += document.slots_per_rank
            order_block += document.num_blocks
        assert tables.mass_blocks == mass_block and tables.block_order.numel() == order_block


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"estimator": "probe_windows"}, None),
        ({"backend": "cuda"}, None),
        ({"backend": "reference"}, "The backend is reference."),
        ({"budget": "cost"}, "not by cost. Set budget to top_p for them."),
        ({"budget": "top_p_literal"}, "not by top_p_literal."),
        ({"num_probe_rows": 200}, None),
        ({"num_probe_rows": 1024}, None),
        ({"estimator": "probe_windows", "num_probe_rows": 512, "num_probe_windows": 64}, None),
    ],
)
def test_which_calls_are_the_kernels(changes, reason, monkeypatch):
    layout = SequenceLayout("contiguous", seq_len=2000, cp_size=1, block_size=8)
    task = task_of(replace(CONFIG, **changes), layout, SoloTransport())
    assert fused.why_not(task)  # on a CPU
    monkeypatch.setattr(cuda, "why_unavailable", lambda **case: None)
    assert fused.why_not(task) is None if reason is None else reason in fused.why_not(task)


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
