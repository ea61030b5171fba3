"""XAttention's selection on tensor cores: by the threshold rule on exact masses, beside the exact way's lists, and bit
for bit over ranks and layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_mtraining import MTrainingConfig, select
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.selection import xattention_tiles
from megatron_mtraining.testing.simulator import RankSimulator

from ..unit.xattention_checks import check_kept, kept_table, xattention_mass
from .cases import Case

pytestmark = pytest.mark.gpu

CONFIG = MTrainingConfig(pattern="xattention", dense_below=0)
PACK = (0, 9, 700, 701, 5000, 12000, 16384)
CASES = [
    (CONFIG, Case(seq_len=24576, num_heads=8, num_kv_heads=2, head_dim=128, magnitude=2.0)),
    (CONFIG, Case(seq_len=16384, num_heads=4, num_kv_heads=2, head_dim=128, magnitude=2.0, bounds=PACK)),
    (
        replace(CONFIG, xattention_threshold=0.5, xattention_stride=8, xattention_block=64),
        Case(seq_len=8192, num_heads=6, num_kv_heads=2, head_dim=64, dtype=torch.float16),
    ),
]
EQUAL_LISTS = 0.99
"""Share of those that are the exact way's entry for entry: masses seldom lie within rounding of each other."""


@pytest.mark.parametrize("table", [xattention_tiles._TABLE_ELEMENTS, 2**20], ids=["one wave", "waves"])
@pytest.mark.parametrize(("config", "case"), CASES, ids=str)
def test_lists_follow_the_rule_on_exact_masses(config, case, table, monkeypatch):
    monkeypatch.setattr(xattention_tiles, "_TABLE_ELEMENTS", table)
    query, key, _ = case.inputs()
    ours, exact = (
        kept_table(select(query, key, each, cu_seqlens=case.cu_seqlens), case.seq_len // each.xattention_block)
        for each in (config, replace(config, backend="reference"))
    )
    check_kept(ours[0], xattention_mass(query[0], key[0], config, case.bounds), config)
    assert (ours == exact).all(-1).float().mean() >= EQUAL_LISTS


@pytest.mark.parametrize(
    ("kind", "cp_size", "node_size"),
    [("striped", 2, None), ("zigzag", 4, None), ("node_striped", 8, 2), ("rotated", 6, None)],
)
def test_ranks_select_what_one_device_does(kind, cp_size, node_size):
    """Every score stands elsewhere in another tile, and has the same bits: as every list says, whatever the layout."""
    case = Case(seq_len=49152, num_heads=8, num_kv_heads=1, head_dim=128, magnitude=2.0)
    query, key, _ = case.inputs()
    layout = SequenceLayout(kind, seq_len=case.seq_len, cp_size=cp_size, node_size=node_size)
    whole = kept_table(select(query, key, CONFIG), case.seq_len // 128)

    def body(group):
        given = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key))
        return select(*given, CONFIG, layout=layout, groups=group)

    for rank, index in enumerate(RankSimulator(cp_size).run(body)):
        assert torch.equal(kept_table(index, case.seq_len // 128), whole[:, :, layout.blocks(rank).cuda()])


def test_the_host_waits_for_nothing_but_the_number_of_entries(monkeypatch):
    """Products, masses and thresholds are enqueued without a wait."""
    case = Case(seq_len=8192, num_heads=4, num_kv_heads=2, head_dim=128)
    query, key, _ = case.inputs()
    select(query, key, CONFIG)
    monkeypatch.setattr("megatron_mtraining.selection.block_lists.ListBuilder.add", lambda self, kept: None)
    monkeypatch.setattr("megatron_mtraining.selection.block_lists.ListBuilder.index", lambda self, *_, **__: None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        select(query, key, CONFIG)
    finally:
        torch.cuda.set_sync_debug_mode("default")
