"""Pairs by owner equal a count over the dense mask, for every layout and odd numbers of ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.commands.balance.owner_pairs import Owners, owner_pairs, owner_pairs_of_ranks
from megatron_mtraining.commands.balance.replay import work_of
from megatron_mtraining.commands.balance.token_striped import token_striped
from megatron_mtraining.config import LAYOUTS, SCHEDULES
from megatron_mtraining.layout import SequenceLayout, token_positions
from megatron_mtraining.metrics import computed_pairs, rank_pairs, ring_work, work_of_pairs
from megatron_mtraining.ring import RingShape, ring_schedule
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.types import VerticalSlashIndex
from tests.layouts import node_size_of

from .attention_inputs import as_cu_seqlens
from .metrics_cases import random_index


def counted_by_rank(mask, ranks_of_tokens, cp_size):
    """int64 ``[cp_size, cp_size]``: true entries of a ``[seq, seq]`` count by the ranks of query and key."""
    one_hot = torch.nn.functional.one_hot(ranks_of_tokens, cp_size).double()
    return (one_hot.T @ mask @ one_hot).long()


def brute_pairs(index, ranks_of_tokens, cp_size, *, cu_seqlens=None):
    """(slash, vertical) off dense masks."""
    only_slashes = VerticalSlashIndex(
        index.vertical, torch.zeros_like(index.num_vertical), index.slash, index.num_slash, index.block_size
    )
    options = {"seq_len": len(ranks_of_tokens), "cu_seqlens": cu_seqlens}
    both, slash = (allowed_mask(each, **options).sum((0, 1)).double() for each in (index, only_slashes))
    return tuple(counted_by_rank(mask, ranks_of_tokens, cp_size) for mask in (slash, both - slash))


def ranks_of(layout):
    ranks = torch.empty(layout.seq_len, dtype=torch.int64)
    for rank in range(layout.cp_size):
        ranks[token_positions(layout, cp_rank=rank)] = rank
    return ranks


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 3, 6])
@pytest.mark.parametrize("bounds", [None, [0, 9, 9, 10, 61, 240]])
def test_pairs_equal_the_mask(kind, cp_size, bounds):
    layout = SequenceLayout(kind, seq_len=240, cp_size=cp_size, block_size=2, node_size=node_size_of(cp_size))
    index = random_index(240, 2, bounds)
    pairs = owner_pairs_of_ranks(index, layout, cu_seqlens=as_cu_seqlens(bounds))
    slash, vertical = brute_pairs(index, ranks_of(layout), cp_size, cu_seqlens=as_cu_seqlens(bounds))
    assert torch.equal(pairs.slash, slash)
    assert torch.equal(pairs.vertical, vertical)
    counted = rank_pairs(index, layout, cu_seqlens=as_cu_seqlens(bounds))
    assert torch.equal(counted[0], slash) and torch.equal(counted[1], vertical.sum(1))


def test_columns_of_another_document_have_no_pairs():
    """Lists may name them, before, after and in a block of both documents; attention passes them over."""
    lists = [[[0, 3, 4, 7, 20]], [[0, 3, 4, 7, 20]]]
    index = VerticalSlashIndex.from_lists(lists, [[[0]], [[0, 2]]], seq_len=24, block_size=4)
    layout, cu_seqlens = SequenceLayout("striped", seq_len=24, cp_size=2, block_size=4), as_cu_seqlens([0, 5, 24])
    pairs = owner_pairs_of_ranks(index, layout, cu_seqlens=cu_seqlens)
    slash, vertical = brute_pairs(index, ranks_of(layout), 2, cu_seqlens=cu_seqlens)
    assert torch.equal(pairs.slash, slash)
    assert torch.equal(pairs.vertical, vertical)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("cp_size", "node_size"), [(1, 1), (3, 8), (4, 2), (6, 3), (6, 1), (9, 3)])
def test_one_rank_has_the_schedule_of_all(schedule, cp_size, node_size):
    layout = SequenceLayout("rotated", seq_len=288, cp_size=cp_size, block_size=4, node_size=min(node_size, cp_size))
    index = random_index(288, 4, None)
    ring = RingShape(kind=schedule, cp_size=cp_size, node_size=node_size)
    schedules = [
        ring_schedule(schedule, cp_rank=rank, cp_size=cp_size, inner_size=min(node_size, cp_size))
        for rank in range(cp_size)
    ]
    work = work_of_pairs(*rank_pairs(index, layout), ring.source_ranks())
    expected = ring_work(index, layout, [each.source_ranks for each in schedules])
    assert torch.equal(work.slash, expected.slash)
    assert torch.equal(work.vertical, expected.vertical)
    assert work.slash.shape[1] == ring.num_steps == len(schedules[0].source_ranks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_verticals_in_the_ring_fall_into_the_step_of_their_key(schedule):
    layout = SequenceLayout("striped", seq_len=144, cp_size=6, block_size=4)
    index = random_index(144, 4, None)
    ring = RingShape(kind=schedule, cp_size=6, node_size=3)
    slash, vertical = brute_pairs(index, ranks_of(layout), 6)
    work = work_of(ring, owner_pairs_of_ranks(index, layout), in_ring=True)
    for rank in range(6):
        own = ring_schedule(schedule, cp_rank=rank, cp_size=6, inner_size=3)
        expected = [sum(int((slash + vertical)[rank, source]) for source in step) for step in own.source_ranks]
        assert work.stages[rank].tolist() == expected


def test_columns_may_have_owners_of_their_own():
    index = random_index(60, 4, None)
    owners = Owners(
        of_blocks=torch.zeros(15, dtype=torch.int64),
        of_columns=torch.arange(60) % 7,
        num_block_owners=1,
        num_column_owners=7,
    )
    pairs = owner_pairs(index, owners, seq_len=60)
    _, vertical = brute_pairs(index, torch.arange(60) % 7, 7)
    assert torch.equal(pairs.vertical, vertical.sum(0, keepdim=True))


@pytest.mark.parametrize(("cp_size", "block_size"), [(1, 4), (2, 4), (3, 4), (4, 4), (3, 8), (7, 8), (8, 4), (12, 4)])
def test_token_striped_equals_the_mask(cp_size, block_size):
    seq_len = cp_size * block_size * 5
    index = random_index(seq_len, block_size, None)
    ranks = torch.arange(seq_len) % cp_size
    counted = token_striped(index, seq_len=seq_len, cp_size=cp_size)
    slash, vertical = brute_pairs(index, ranks, cp_size)
    assert torch.equal(counted.pairs.slash, slash)
    assert torch.equal(counted.pairs.vertical, vertical)
    assert torch.equal(counted.issued.vertical, vertical)


@pytest.mark.parametrize(("cp_size", "block_size"), [(1, 4), (3, 4), (4, 4), (7, 8), (8, 4), (12, 4)])
def test_token_striped_tiles_are_those_that_hold_a_pair(cp_size, block_size):
    """But on the diagonal, tiles of ranks of one block count even where the key's rank is the later one."""
    tiles = 6
    seq_len = cp_size * block_size * tiles
    index = VerticalSlashIndex.from_lists(
        [[[], []]], [[[0, 1, 2 * cp_size + 1], [0, 1, 4 * cp_size]]], seq_len=seq_len, block_size=block_size
    )
    token = torch.arange(seq_len)
    local = token.view(-1, cp_size).T.unflatten(1, (tiles, block_size))  # [rank, tile, token of the tile]
    mask = allowed_mask(index, seq_len=seq_len)[0]
    expected = torch.zeros(cp_size, cp_size, dtype=torch.int64)
    for query_rank in range(cp_size):
        for key_rank in range(cp_size):
            rows = mask[:, local[query_rank].flatten()][:, :, local[key_rank].flatten()]
            held = rows.unflatten(2, (tiles, block_size)).unflatten(1, (tiles, block_size)).any(4).any(2)
            same_block = query_rank // block_size == key_rank // block_size
            held |= torch.eye(tiles, dtype=torch.bool) & same_block
            expected[query_rank, key_rank] = held.sum() * block_size**2
    assert torch.equal(token_striped(index, seq_len=seq_len, cp_size=cp_size).issued.slash, expected)


def test_hundreds_of_ranks_and_a_million_tokens():
    layout = SequenceLayout("rotated", seq_len=1 << 20, cp_size=256)
    far = [0, 1, 2, 1024, 5000, 16383]
    index = VerticalSlashIndex.from_lists([[list(range(128)) + [70000]]], [[far]], seq_len=layout.seq_len)
    pairs = owner_pairs_of_ranks(index, layout)
    counted = rank_pairs(index, layout)
    assert torch.equal(counted[0], pairs.slash) and torch.equal(counted[1], pairs.vertical.sum(1))
    assert int(pairs.slash.sum() + pairs.vertical.sum()) == int(computed_pairs(index, seq_len=layout.seq_len))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kind": "flat", "cp_size": 0, "node_size": 2}, r"cp_size must be up to the 2 ranks .* got 0\."),
        ({"kind": "flat", "cp_size": 12, "node_size": 8}, r"cp_size must be up to the 8 ranks of a node or a multiple"),
    ],
)
def test_rings_that_do_not_fill_nodes_raise(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        RingShape(**given)


def test_another_block_size_is_refused():
    layout = SequenceLayout("striped", seq_len=64, cp_size=2, block_size=4)
    with pytest.raises(ValueError, match=r"layout\.block_size must be the index's 8, got 4\."):
        owner_pairs_of_ranks(random_index(64, 8, None), layout)


@pytest.mark.parametrize(
    ("cp_size", "seq_len", "sentence"),
    [
        (6, 96, r"--world must be up to 4 or a multiple of it for token_striped, got 6\."),
        (4, 40, r"--seq must be a multiple of 16 for token_striped over 4 ranks, got 40\."),
    ],
)
def test_token_striped_raises_where_it_is_no_model(cp_size, seq_len, sentence):
    with pytest.raises(ValueError, match=sentence):
        token_striped(random_index(seq_len, 4, None), seq_len=seq_len, cp_size=cp_size)
