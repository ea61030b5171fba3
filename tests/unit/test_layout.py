"""Layouts are permutations, agree with the formulas they are named after, and spread slashes as they say."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_mtraining.config import LAYOUTS
from megatron_mtraining.layout import SequenceLayout, gather_sequence, shard_sequence, token_positions
from tests.layouts import node_size_of

SIZES = range(1, 65)


def layout_of(kind, cp_size, *, turns=3, block_size=4):
    """A layout of ``turns`` times the least length."""
    seq_len = turns * max(block_size, SequenceLayout.required_multiple(kind, cp_size=cp_size, block_size=block_size))
    return SequenceLayout(
        kind, seq_len=seq_len, cp_size=cp_size, block_size=block_size, node_size=node_size_of(cp_size)
    )


@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_are_a_permutation_for_every_size(kind):
    for cp_size in SIZES:
        layout = layout_of(kind, cp_size)
        table, owners, slots = layout.blocks_by_rank(), layout.owners(), layout.slots()
        assert table.shape == (cp_size, layout.num_local_blocks)
        assert torch.equal(table.flatten().sort().values, torch.arange(layout.num_blocks))
        assert torch.equal(table[owners, slots], torch.arange(layout.num_blocks))
        assert bool((table.diff(dim=1) > 0).all()), "blocks of a rank ascend"
        assert torch.equal(torch.bincount(owners, minlength=cp_size), torch.full((cp_size,), layout.num_local_blocks))
        assert all(torch.equal(layout.blocks(rank), table[rank]) for rank in range(cp_size))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_positions_are_a_permutation_for_every_size(kind):
    for cp_size in SIZES:
        layout = layout_of(kind, cp_size)
        positions = torch.cat([token_positions(layout, cp_rank=rank) for rank in range(cp_size)])
        assert positions.dtype == torch.int64
        assert torch.equal(positions.sort().values, torch.arange(layout.seq_len))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_is_the_inverse_of_shard(kind, dim):
    for cp_size in SIZES:
        layout = layout_of(kind, cp_size)
        whole = torch.randn(2, layout.seq_len, 3).movedim(1, dim)
        parts = [shard_sequence(whole, layout, cp_rank=rank, dim=dim) for rank in range(cp_size)]
        assert all(part.shape[dim] == layout.local_len for part in parts)
        assert torch.equal(gather_sequence(parts, layout, dim=dim), whole)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_shards_hold_the_tokens_that_positions_say(kind):
    layout = layout_of(kind, 6)
    for rank in range(6):
        part = shard_sequence(torch.arange(layout.seq_len), layout, cp_rank=rank, dim=0)
        assert torch.equal(part, token_positions(layout, cp_rank=rank))


def test_contiguous_is_equal_pieces():
    for cp_size in SIZES:
        layout = layout_of("contiguous", cp_size)
        for rank, piece in enumerate(torch.arange(layout.seq_len).chunk(cp_size)):
            assert torch.equal(token_positions(layout, cp_rank=rank), piece)


def test_zigzag_is_megatrons_split():
    """Megatron views the sequence as 2W chunks and takes numbers r and 2W - 1 - r on rank r."""
    for cp_size in SIZES:
        layout = layout_of("zigzag", cp_size)
        chunks = torch.arange(layout.seq_len).view(2 * cp_size, -1)
        for rank in range(cp_size):
            megatron = chunks[torch.tensor([rank, 2 * cp_size - 1 - rank])].flatten()
            assert torch.equal(token_positions(layout, cp_rank=rank), megatron)


def test_striped_deals_blocks_in_turn():
    for cp_size in SIZES:
        assert layout_of("striped", cp_size).owners().tolist() == [b % cp_size for b in range(3 * cp_size)]


@pytest.mark.parametrize(("cp_size", "node_size"), [(4, 2), (6, 3), (6, 2), (12, 4), (15, 5)])
def test_node_striped_deals_to_nodes_then_to_ranks_and_swaps_nodes(cp_size, node_size):
    turns, nodes = 2 * node_size + 1, cp_size // node_size
    layout = SequenceLayout(
        "node_striped", seq_len=turns * cp_size * 4, cp_size=cp_size, block_size=4, node_size=node_size
    )
    dealt = [place * nodes + node for node in range(nodes) for place in range(node_size)]
    for turn, owners in enumerate(layout.owners().view(turns, cp_size)):
        swaps = turn // node_size
        for rank, number in enumerate(dealt):
            assert owners[number] == (rank + swaps * node_size) % cp_size


@pytest.mark.parametrize("node_size", [1, 8])
def test_node_striped_on_one_level_is_striped(node_size):
    sizes = {"seq_len": 8 * 64 * 9, "cp_size": 8}
    owners = SequenceLayout("node_striped", **sizes, node_size=node_size).owners()
    assert torch.equal(owners, SequenceLayout("striped", **sizes).owners())


def test_only_node_striped_knows_its_nodes():
    """So that layouts which place every block alike are equal."""
    sizes = {"seq_len": 1024, "cp_size": 4}
    assert SequenceLayout("rotated", **sizes, node_size=2) == SequenceLayout("rotated", **sizes)
    assert SequenceLayout("node_striped", **sizes, node_size=2) != SequenceLayout("node_striped", **sizes, node_size=4)


def test_rotated_follows_its_formula():
    for cp_size in SIZES:
        want = [(b + (b // cp_size) * (b // cp_size + 1) // 2) % cp_size for b in range(3 * cp_size)]
        assert layout_of("rotated", cp_size).owners().tolist() == want


@pytest.mark.parametrize("cp_size", [2, 3, 4, 5, 8, 12, 16, 31])
@pytest.mark.parametrize("multiple", [1, 2, 3, 5, 12])
def test_rotated_spreads_a_slash_at_a_multiple_of_the_ring_where_striped_does_not(cp_size, multiple):
    """The ring step of a block pair is the difference of its owners; ``multiple * turn + constant`` when rotated."""

    def ring_steps(kind):
        owners = layout_of(kind, cp_size, turns=2 * cp_size + multiple).owners()
        distance = multiple * cp_size
        return torch.bincount((owners[distance:] - owners[:-distance]) % cp_size, minlength=cp_size)

    striped, rotated = ring_steps("striped"), ring_steps("rotated")
    assert striped.tolist() == [int(striped.sum())] + [0] * (cp_size - 1)
    num_steps = cp_size // math.gcd(cp_size, multiple)
    assert sorted(rotated.tolist(), reverse=True) == [int(rotated.sum()) // num_steps] * num_steps + [0] * (
        cp_size - num_steps
    )


@pytest.mark.parametrize("kind", ["striped", "rotated"])
def test_a_longer_sequence_keeps_the_owners_of_its_beginning(kind):
    for cp_size in SIZES:
        short, long = layout_of(kind, cp_size, turns=2).owners(), layout_of(kind, cp_size, turns=5).owners()
        assert torch.equal(long[: short.numel()], short)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seq_len", [1, 63, 64, 1025])
def test_one_rank_takes_any_length(kind, seq_len):
    layout = SequenceLayout(kind, seq_len=seq_len, cp_size=1)
    assert layout.num_blocks == layout.num_local_blocks == -(-seq_len // 64)
    assert torch.equal(token_positions(layout, cp_rank=0), torch.arange(seq_len))
    whole = torch.randn(seq_len, 2)
    assert torch.equal(gather_sequence([shard_sequence(whole, layout, cp_rank=0, dim=0)], layout, dim=0), whole)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("spiral", {}, "layout must be one of contiguous, zigzag, striped, rotated, node_striped, got 'spiral'."),
        ("striped", {"cp_size": 0}, "cp_size must be an integer of at least 1, got 0."),
        ("striped", {"block_size": 0}, "block_size must be an integer of at least 1, got 0."),
        ("striped", {"seq_len": 0}, "seq_len must be an integer of at least 1, got 0."),
        (
            "striped",
            {"seq_len": 1000},
            "seq_len must be a multiple of 256 for the striped layout over 4 ranks, got 1000. "
            "Pad the sequence to 1024 tokens with a zero loss mask.",
        ),
        (
            "node_striped",
            {},
            "node_size must be a divisor of the 4 ranks for the node_striped layout, got None. "
            "Give the number of ranks in an inner ring.",
        ),
        (
            "node_striped",
            {"node_size": 3},
            "node_size must be a divisor of the 4 ranks for the node_striped layout, got 3",
        ),
        (
            "node_striped",
            {"node_size": 0},
            "node_size must be a divisor of the 4 ranks for the node_striped layout, got 0",
        ),
        ("zigzag", {"seq_len": 768}, "seq_len must be a multiple of 512 for the zigzag layout over 4 ranks, got 768."),
    ],
)
def test_refused_layouts(kind, changes, sentence):
    with pytest.raises(ValueError) as caught:
        SequenceLayout(kind, **({"seq_len": 1024, "cp_size": 4} | changes))
    assert str(caught.value).startswith(sentence)


def test_refused_parts():
    layout = SequenceLayout("striped", seq_len=256, cp_size=4)
    with pytest.raises(ValueError, match=r"tensor.shape\[1\] must be the layout's seq_len 256, got 250."):
        shard_sequence(torch.zeros(1, 250), layout, cp_rank=0, dim=1)
    for cp_rank in (-1, 4):
        with pytest.raises(ValueError, match=rf"cp_rank must be in \[0, 4\), got {cp_rank}."):
            token_positions(layout, cp_rank=cp_rank)
    sentence = r"layout must be a SequenceLayout, got 'striped'. SequenceLayout\(kind, seq_len=..., cp_size=...\) makes"
    for call in (
        lambda: token_positions("striped", cp_rank=0),
        lambda: shard_sequence(torch.zeros(256), "striped", cp_rank=0, dim=0),
        lambda: gather_sequence([torch.zeros(64)] * 4, "striped", dim=0),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            call()
    with pytest.raises(ValueError, match="parts must be one tensor for each of 4 ranks, got 3 tensors."):
        gather_sequence([torch.zeros(64)] * 3, layout, dim=0)
    with pytest.raises(ValueError, match=r"parts\[2\].shape\[0\] must be the layout's local_len 64, got 60."):
        gather_sequence([torch.zeros(64)] * 2 + [torch.zeros(60)] + [torch.zeros(64)], layout, dim=0)
