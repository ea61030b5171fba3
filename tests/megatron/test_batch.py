"""The batch is split once, as the layout says; padding counts for nothing."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.config import LAYOUTS
from megatron_mtraining.layout import SequenceLayout, gather_sequence
from megatron_mtraining.megatron import document_position_ids, packed_seq_params, pad_batch, shard_batch
from tests.layouts import node_size_of

PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")


def whole_batch(seq_len: int, rows: int = 2) -> dict[str, torch.Tensor]:
    text = torch.arange(rows * (seq_len + 1)).view(rows, -1)
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": torch.ones(rows, seq_len),
        "position_ids": torch.arange(seq_len).expand(rows, -1),
    }


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 3, 4])
def test_every_token_is_on_one_rank_with_all_that_belongs_to_it(kind: str, cp_size: int):
    layout = SequenceLayout(
        kind, seq_len=96 if cp_size == 3 else 128, cp_size=cp_size, block_size=8, node_size=node_size_of(cp_size)
    )
    whole = whole_batch(layout.seq_len)
    parts = [shard_batch(whole, layout, rank) for rank in range(cp_size)]
    for name in PER_TOKEN:
        assert all(part[name].shape == (2, layout.local_len) for part in parts)
        assert torch.equal(gather_sequence([part[name] for part in parts], layout, dim=1), whole[name])
    assert all(torch.equal(part["labels"], part["tokens"] + 1) for part in parts)


def test_what_describes_the_whole_sequence_passes_unchanged():
    layout = SequenceLayout("striped", seq_len=32, cp_size=2, block_size=8)
    cu_seqlens = torch.tensor([0, 10, 32], dtype=torch.int32)
    part = shard_batch(whole_batch(32) | {"cu_seqlens": cu_seqlens, "labels": None, "attention_mask": None}, layout, 1)
    assert part["cu_seqlens"] is cu_seqlens
    assert part["labels"] is None
    assert part["attention_mask"] is None


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 32, 32)},
            r"attention_mask must be None, got a tensor of shape \(1, 1, 32,",
        ),
        ({"images": torch.ones(2, 3)}, "batch must be of tokens, .*, got 'images'. Split it with shard_sequence"),
        ({"tokens": torch.ones(2, 31)}, r"tensor.shape\[1\] must be the layout's seq_len 32, got 31"),
    ],
)
def test_what_cannot_be_split_is_refused(extra: dict[str, torch.Tensor], sentence: str):
    layout = SequenceLayout("striped", seq_len=32, cp_size=2, block_size=8)
    with pytest.raises(ValueError, match=sentence):
        shard_batch(whole_batch(32) | extra, layout, 0)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_2999_tokens_over_four_ranks(kind: str):
    multiple = SequenceLayout.required_multiple(kind, cp_size=4)
    padded = pad_batch(whole_batch(2999), multiple, pad_token=7)
    layout = SequenceLayout(kind, seq_len=padded["tokens"].shape[1], cp_size=4, node_size=2)
    assert layout.seq_len == 3072
    assert padded["loss_mask"].sum() == 2 * 2999
    assert (padded["loss_mask"][:, 2999:] == 0).all()
    assert (padded["tokens"][:, 2999:] == 7).all()
    assert torch.equal(padded["position_ids"][1], torch.arange(3072))
    parts = [shard_batch(padded, layout, rank) for rank in range(4)]
    assert sum(part["loss_mask"].sum() for part in parts) == 2 * 2999


def test_a_batch_that_needs_no_padding_is_not_copied():
    whole = whole_batch(128)
    assert pad_batch(whole, 64)["tokens"] is whole["tokens"]


def test_the_padding_of_a_pack_is_a_document_of_its_own():
    bounds = torch.tensor([0, 20, 30], dtype=torch.int32)
    packed = whole_batch(30, rows=1) | {"position_ids": document_position_ids(bounds), "cu_seqlens": bounds}
    padded = pad_batch(packed, 16)
    assert padded["cu_seqlens"].tolist() == [0, 20, 30, 32]
    assert padded["cu_seqlens"].dtype == torch.int32
    assert torch.equal(padded["position_ids"], document_position_ids(padded["cu_seqlens"]))
    params = packed_seq_params(padded["cu_seqlens"])
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 20, 20)


def test_padding_asks_for_a_loss_mask_and_comes_before_packed_seq_params():
    with pytest.raises(ValueError, match="loss_mask must be given for a batch that is padded"):
        pad_batch(whole_batch(30) | {"loss_mask": None}, 16)
    params = packed_seq_params(torch.tensor([0, 30], dtype=torch.int32))
    with pytest.raises(ValueError, match="packed_seq_params must be made after padding"):
        pad_batch(whole_batch(30) | {"packed_seq_params": params}, 16)


def test_positions_restart_with_each_document():
    bounds = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)
    assert document_position_ids(bounds).tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
