"""Packing of vertical rows over ranks, and the way of their gradients back."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.layout import SequenceLayout, gather_sequence, shard_sequence
from megatron_mtraining.types import Documents, VerticalSlashIndex

from .attention_inputs import random_index, random_inputs

BOUNDS = (0, 19, 20, 64)
LAYOUT = SequenceLayout("striped", seq_len=64, cp_size=4, block_size=4)


def rank_geometry(rank: int, documents: Documents | None = None) -> BlockGeometry:
    """What one rank of LAYOUT holds."""
    blocks = LAYOUT.blocks(rank)
    return BlockGeometry(seq_len=64, block_size=4, query_blocks=blocks, key_blocks=blocks, documents=documents)


def packed_by_definition(key: torch.Tensor, index: VerticalSlashIndex, *, is_packed_documents: bool) -> torch.Tensor:
    """Row by row, in Python."""
    group = index.num_lists // key.shape[2]
    packed = torch.zeros(*index.vertical.shape, key.shape[-1], dtype=key.dtype)
    for row in range(index.rows):
        for head in range(index.num_lists):
            for entry in range(int(index.num_vertical[row, head])):
                batch = 0 if is_packed_documents else row
                packed[row, head, entry] = key[batch, int(index.vertical[row, head, entry]), head // group]
    return packed


@pytest.mark.parametrize("documents", [None, Documents(BOUNDS)], ids=["batch", "documents"])
def test_packs_of_all_ranks_join_to_the_selected_rows(documents: Documents | None) -> None:
    batch, rows = (2, 2) if documents is None else (1, 3)
    index = random_index(rows, 4, 64, 4, cu_seqlens=None if documents is None else BOUNDS)
    _, key, value = random_inputs(batch, 64, 4, 2, 6)
    whole = ReferenceBackend().pack(
        key, value, index, BlockGeometry.whole(seq_len=64, block_size=4, documents=documents)
    )
    for tensor, packed in zip((key, value), whole, strict=True):
        assert torch.equal(packed, packed_by_definition(tensor, index, is_packed_documents=documents is not None))
    parts = [
        ReferenceBackend().pack(
            *(shard_sequence(tensor, LAYOUT, cp_rank=rank, dim=1) for tensor in (key, value)),
            index,
            rank_geometry(rank, documents),
        )
        for rank in range(4)
    ]
    for which in (0, 1):
        holders = sum((part[which] != 0).any(-1).int() for part in parts)
        assert int(holders.max()) == 1, "a row is held by one rank, and padding by none"
        assert torch.equal(sum(part[which] for part in parts), whole[which])


def test_rows_that_are_not_held_are_zero_bits_behind_nan() -> None:
    index = VerticalSlashIndex.from_lists([[[4, 9, 10]]], [[[0]]], seq_len=16, block_size=4)
    geometry = BlockGeometry(
        seq_len=16, block_size=4, query_blocks=torch.tensor([0, 2]), key_blocks=torch.tensor([0, 2])
    )
    key = torch.full((1, 8, 1, 2), torch.nan)
    key[:, 5:7] = torch.tensor([5.0, 6.0]).view(1, 2, 1, 1)  # positions 9 and 10
    packed, _ = ReferenceBackend().pack(key, key, index, geometry)
    assert torch.equal(
        packed[0, 0].view(torch.int32), torch.tensor([[0.0] * 2, [5.0] * 2, [6.0] * 2]).view(torch.int32)
    )


@pytest.mark.parametrize("documents", [None, Documents(BOUNDS)], ids=["batch", "documents"])
def test_gradients_come_home(documents: Documents | None) -> None:
    """Unpacking is the transpose of packing, over ranks too: the sum of what each rank takes is autograd's gradient."""
    batch, rows = (2, 2) if documents is None else (1, 3)
    index = random_index(rows, 4, 64, 4, cu_seqlens=None if documents is None else BOUNDS)
    key = torch.randn(batch, 64, 2, 6, dtype=torch.float64, requires_grad=True)
    value = torch.randn_like(key, requires_grad=True)
    grad_packed = torch.randn(2, rows, 4, index.vertical.shape[-1], 6, dtype=torch.float64)
    packed = ReferenceBackend().pack(
        key, value, index, BlockGeometry.whole(seq_len=64, block_size=4, documents=documents)
    )
    expected = torch.autograd.grad(packed, (key, value), grad_packed)
    parts = []
    for rank in range(4):
        grads = torch.ones(2, batch, 16, 2, 6, dtype=torch.float64)
        geometry = rank_geometry(rank, documents)
        parts.append(ReferenceBackend().unpack(grad_packed, index, geometry, grad_kv=grads, dtype=grads.dtype) - 1.0)
    for got, exact in zip(gather_sequence(parts, LAYOUT, dim=2), expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_nan_in_gradients_of_padding_stays_out() -> None:
    index = VerticalSlashIndex.from_lists([[[3], [1, 2]]], [[[0], [0]]], seq_len=4, block_size=4)
    grad_packed = torch.ones(1, 2, 2, 5)
    grad_packed[0, 0, 1] = torch.nan
    grads = torch.zeros(2, 1, 4, 1, 5)
    geometry = BlockGeometry.whole(seq_len=4, block_size=4)
    home = ReferenceBackend().unpack(
        grad_packed.expand(2, -1, -1, -1, -1), index, geometry, grad_kv=grads, dtype=torch.bfloat16
    )
    assert home.dtype == torch.bfloat16
    assert home[:, 0, :, 0, 0].tolist() == [[0.0, 1.0, 1.0, 1.0]] * 2
