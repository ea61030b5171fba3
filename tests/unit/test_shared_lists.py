"""An index with one list for each key/value head: the attention of its lists written out for every query head."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import sparse_attention
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.metrics import attention_recall, computed_pairs, density
from megatron_mtraining.testing.error_budget import run_with_gradients
from megatron_mtraining.testing.oracle import oracle_attention
from megatron_mtraining.transport.agreement import index_digest
from megatron_mtraining.types import VerticalSlashIndex

from .attention_inputs import as_cu_seqlens, random_index, random_inputs

BOUNDS = (0, 19, 20, 53)
HEADS, KV_HEADS, SEQ_LEN = 6, 2, 53


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["batch", "documents"])
def test_attention_and_all_gradients_are_those_of_lists_for_every_head(bounds: tuple[int, ...] | None) -> None:
    batch, rows = (2, 2) if bounds is None else (1, 3)
    index = random_index(rows, KV_HEADS, SEQ_LEN, 8, cu_seqlens=bounds)
    inputs = random_inputs(batch, SEQ_LEN, HEADS, KV_HEADS, 4)
    grads = {"grad_out": torch.randn_like(inputs[0]), "grad_lse": torch.randn(batch, HEADS, SEQ_LEN).double()}
    options = {"cu_seqlens": as_cu_seqlens(bounds)}

    def solve(attention: object, lists: VerticalSlashIndex, **more: str) -> dict[str, torch.Tensor]:
        return run_with_gradients(lambda *qkv: attention(*qkv, index=lists, **options, **more), *inputs, **grads)

    shared = solve(sparse_attention, index)
    written_out = solve(sparse_attention, index.per_head(HEADS))
    dense_mask = solve(oracle_attention, index)
    for name, tensor in shared.items():
        torch.testing.assert_close(tensor, written_out[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(tensor, dense_mask[name], rtol=1e-10, atol=1e-10)


def test_packs_hold_a_list_once() -> None:
    index = random_index(2, KV_HEADS, SEQ_LEN, 8)
    _, key, value = random_inputs(2, SEQ_LEN, HEADS, KV_HEADS, 4)
    geometry = BlockGeometry.whole(seq_len=SEQ_LEN, block_size=8)
    packed = ReferenceBackend().pack(key, value, index, geometry)
    assert packed.shape[:3] == (2, 2, KV_HEADS)
    packed_for_all = ReferenceBackend().pack(key, value, index.per_head(HEADS), geometry)
    assert torch.equal(packed_for_all, packed.repeat_interleave(HEADS // KV_HEADS, dim=2))


def test_what_is_measured_is_that_of_every_head() -> None:
    index = random_index(2, KV_HEADS, SEQ_LEN, 8)
    written_out = index.per_head(HEADS)
    group = HEADS // KV_HEADS
    assert written_out.num_lists == HEADS
    assert torch.equal(
        computed_pairs(index, seq_len=SEQ_LEN).repeat_interleave(group, 1), computed_pairs(written_out, seq_len=SEQ_LEN)
    )
    means = [float(density(each, seq_len=SEQ_LEN).mean()) for each in (index, written_out)]
    assert means[0] == pytest.approx(means[1], rel=1e-12)
    query, key, _ = random_inputs(2, SEQ_LEN, HEADS, KV_HEADS, 4)
    recalls = [attention_recall(query, key, each, rows=(5, 20, 52)) for each in (index, written_out)]
    assert torch.equal(*recalls)
    assert not torch.equal(index_digest(index), index_digest(written_out)), "ranks must agree on how lists are shared"


def test_a_dense_index_stays_one_list_in_memory() -> None:
    index = VerticalSlashIndex.dense(rows=3, num_heads=2, seq_len=4096, block_size=8).per_head(32)
    assert index.slash.shape == (3, 32, 512)
    assert index.slash.untyped_storage().nbytes() == 512 * 4


def test_heads_must_share_lists_evenly() -> None:
    with pytest.raises(ValueError, match=r"num_heads must be a multiple of the index's 2 lists, got 5\."):
        random_index(1, 2, 16, 4).per_head(5)
