"""Packing, the way back of packed gradients, and delta: against the plain PyTorch functions that they stand for."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.backends.cuda import cuda_backend
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.testing.error_budget import nan_filled_empty

from .cases import BLOCK, Case

pytestmark = pytest.mark.gpu

CASES = [
    Case(seq_len=625, num_heads=4, num_kv_heads=2, head_dim=128),
    Case(seq_len=640, num_heads=8, num_kv_heads=1, head_dim=96, batch=2, dtype=torch.float16),
    Case(seq_len=700, num_heads=2, num_kv_heads=2, head_dim=64, max_vertical=0),
    Case(seq_len=625, num_heads=4, num_kv_heads=2, head_dim=64, bounds=(0, 9, 9, 130, 300, 625)),
    Case(seq_len=625, num_heads=6, num_kv_heads=2, head_dim=96, batch=2, shares_lists=True),
]


def held(case: Case, blocks: list[int] | None) -> tuple[BlockGeometry, list[torch.Tensor]]:
    """A geometry that holds some blocks of keys, and key and value of these."""
    whole = BlockGeometry.whole(seq_len=case.seq_len, block_size=BLOCK, documents=case.documents)
    _, key, value = case.inputs()
    if blocks is None:
        return whole, [key, value]
    geometry = BlockGeometry(
        seq_len=case.seq_len,
        block_size=BLOCK,
        query_blocks=torch.tensor(blocks),
        key_blocks=torch.tensor(blocks),
        documents=case.documents,
    )
    rows = torch.cat([torch.arange(block * BLOCK, block * BLOCK + BLOCK) for block in blocks]).cuda()
    return geometry, [tensor[:, rows] for tensor in (key, value)]


@pytest.mark.parametrize("blocks", [None, [7, 1, 4]], ids=["whole", "some"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packing_and_its_transpose_give_the_same_bits(case, blocks):
    index = case.index()
    geometry, keys = held(case, blocks)
    expected = ReferenceBackend().pack(*keys, index, geometry)
    with nan_filled_empty():
        packed = cuda_backend().pack(*keys, index, geometry)
    for ours, theirs in zip(packed, expected, strict=True):
        assert torch.equal(ours, theirs)
    grad_packed = torch.randn(packed.shape, device="cuda")
    grad_keys = torch.randn(2, *keys[0].shape, device="cuda")
    options = {"dtype": case.dtype}
    with nan_filled_empty():
        ours = cuda_backend().unpack(grad_packed, index, geometry, grad_kv=grad_keys.clone(), **options)
    assert torch.equal(ours, ReferenceBackend().unpack(grad_packed, index, geometry, grad_kv=grad_keys, **options))


@pytest.mark.parametrize("with_grad_lse", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_delta(case, with_grad_lse):
    out, (grad_out, grad_lse) = case.inputs()[0], case.gradients()
    grad_lse = grad_lse if with_grad_lse else None
    with nan_filled_empty():
        ours = cuda_backend().softmax_delta(grad_out, out, grad_lse)
    exact = ReferenceBackend().softmax_delta(
        grad_out.double(), out.double(), None if grad_lse is None else grad_lse.double()
    )
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)


def test_operators_pass_opcheck():
    from megatron_mtraining.backends.cuda import row_operators
    from megatron_mtraining.backends.cuda.geometry import device_geometry

    case = CASES[0]
    index, (_, key, value), (grad_out, grad_lse) = case.index(), case.inputs(), case.gradients()
    tables = device_geometry(BlockGeometry.whole(seq_len=625, block_size=BLOCK), key.device)
    lists = (index.vertical, index.num_vertical)
    torch.library.opcheck(row_operators.pack_vertical, (key, value, *lists, tables.key_slots, tables.document_tiles))
    grad_packed = torch.randn(2, *index.vertical.shape, 128, device="cuda")
    grad_keys = torch.zeros(2, *key.shape, device="cuda")
    torch.library.opcheck(
        row_operators.unpack_vertical_grad, (grad_packed, *lists, tables.key_tiles, grad_keys, key.dtype)
    )
    torch.library.opcheck(row_operators.softmax_delta, (grad_out, case.inputs()[0], grad_lse))
