"""Partial results at their edges: both sides empty, one side empty, and an error that must not grow with ring steps."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.backends.cuda import cuda_backend
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.types import AttentionOutput

from .cases import BLOCK, Case
from .ring_checks import check_ring

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_stay_empty_when_no_step_has_a_key(head_dim):
    """Blocks 1 and 6 against key block 5, twice: row block 1 has no key, and garbage stands behind its empty result.

    What stands behind an lse of -inf matters to nobody before the last step; that one must write 0.
    """
    case = Case(seq_len=512, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    query, key, value = (tensor[:, : BLOCK * n] for tensor, n in zip(case.inputs(), (2, 1, 1), strict=True))
    geometry = BlockGeometry(
        seq_len=512, block_size=BLOCK, query_blocks=torch.tensor([1, 6]), key_blocks=torch.tensor([5])
    )
    index = VerticalSlashIndex.from_lists([[[]] * 2], [[[0, 1]] * 2], seq_len=512).to("cuda")
    garbage = torch.full((1, 128, 2, head_dim), torch.nan, device="cuda")
    result = AttentionOutput(garbage, torch.full((1, 2, 128), -torch.inf, device="cuda"))
    for is_last in (False, True):
        result = cuda_backend().forward(
            query, key, value, index, geometry, softmax_scale=case.scale, previous=result, is_last=is_last
        )
        assert bool((result.lse[:, :, :BLOCK] == -torch.inf).all()) and bool(result.lse[:, :, BLOCK:].isfinite().all())
    assert bool((result.out[:, :BLOCK] == 0).all()) and bool(result.out[:, BLOCK:].isfinite().all())


@pytest.mark.parametrize("cp_size", [2, 16])
def test_the_error_does_not_grow_with_the_ring(cp_size):
    """Sixteen steps, each continuing the one before, under the same budget as two."""
    case = Case(seq_len=1024, num_heads=2, num_kv_heads=1, head_dim=128)
    check_ring(case, VerticalSlashIndex.dense(rows=1, num_heads=2, seq_len=1024, device="cuda"), "striped", cp_size)


def test_a_length_that_four_ranks_do_not_divide():
    """2999 tokens, padded to what four ranks divide; the padding is a document of its own."""
    padded = 12 * 4 * BLOCK
    case = Case(seq_len=padded, num_heads=2, num_kv_heads=1, head_dim=64, bounds=(0, 2999, padded), max_slash=6)
    check_ring(case, case.index(), "rotated", 4)
