"""XAttention by matrix products in tiles, on a CPU: the paper's rule up to rounding, the same lists in every ring."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from megatron_mtraining import MTrainingConfig, select
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.selection import xattention_tiles
from megatron_mtraining.testing.simulator import RankSimulator

from .attention_inputs import as_cu_seqlens
from .xattention_checks import check_kept, kept_table, xattention_mass

SEQ_LEN = 384
CONFIG = MTrainingConfig(
    pattern="xattention",
    xattention_block=16,
    xattention_stride=4,
    xattention_threshold=0.7,
    block_size=8,
    dense_below=0,
)
BOUNDS = (0, 5, 70, 72, 200, 384)
RINGS = [("zigzag", 2, None), ("striped", 3, None), ("node_striped", 4, 2)]


@pytest.fixture
def in_small_tiles(monkeypatch):
    """Several tiles, waves and shares of heads, of which the last ones are filled up."""
    monkeypatch.setattr(xattention_tiles, "takes", lambda call: True)
    monkeypatch.setattr(xattention_tiles, "_TILE_GROUPS", 20)
    monkeypatch.setattr(xattention_tiles, "_TABLE_ELEMENTS", 20 * 48 * 4)


def whole_numbers(num_heads: int) -> torch.Tensor:
    """Products of such are exact in float32 too, in whatever order they are added up."""
    return torch.randint(-3, 4, (1, SEQ_LEN, num_heads, 8)).bfloat16()


@pytest.mark.usefixtures("in_small_tiles")
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["one sequence", "packed documents"])
def test_lists_follow_the_rule_and_do_not_depend_on_ranks(bounds):
    torch.manual_seed(3)
    query, key, cu_seqlens = whole_numbers(6), whole_numbers(2), as_cu_seqlens(bounds)
    kept = kept_table(select(query, key, CONFIG, cu_seqlens=cu_seqlens), SEQ_LEN // 16)[0]
    check_kept(kept, xattention_mass(query[0], key[0], CONFIG, bounds), CONFIG)
    for kind, cp_size, node_size in RINGS:
        layout = SequenceLayout(kind, seq_len=SEQ_LEN, cp_size=cp_size, block_size=8, node_size=node_size)

        def body(group, layout=layout):
            given = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key))
            return select(*given, CONFIG, layout=layout, groups=group, cu_seqlens=cu_seqlens)

        for rank, index in enumerate(RankSimulator(cp_size).run(body)):
            assert torch.equal(kept_table(index, SEQ_LEN // 16)[0], kept[:, layout.blocks(rank)])


@pytest.mark.usefixtures("in_small_tiles")
def test_a_last_tile_of_one_block_that_is_not_full():
    """Under autocast, which would round products to another dtype."""
    torch.manual_seed(4)
    query, key = torch.randn(2, 86, 4, 8).half(), torch.randn(2, 86, 2, 8).half()
    config = replace(CONFIG, xattention_block=8, xattention_threshold=0.4)
    with torch.autocast("cpu", torch.bfloat16):
        kept = kept_table(select(query, key, config), 11)
    whole_query, whole_key = (pad(each, (0, 0, 0, 0, 0, 2)) for each in (query, key))
    for row in range(2):
        check_kept(kept[row], xattention_mass(whole_query[row], whole_key[row], config), config)


def test_a_cpu_takes_the_exact_way(monkeypatch):
    monkeypatch.setattr(
        xattention_tiles, "selected_chunks", lambda *given: pytest.fail("the tensor cores' way on a CPU")
    )
    query, key = torch.randn(1, 64, 2, 8).bfloat16(), torch.randn(1, 64, 1, 8).bfloat16()
    assert select(query, key, CONFIG).num_lists == 2
