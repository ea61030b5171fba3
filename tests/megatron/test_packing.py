"""The bounds of documents are read once per batch, never of an earlier batch, and no layer waits for the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_mtraining.megatron.documents import documents_of

from . import tiny_gpt
from .ranks import run_on_ranks

SEQ_LEN = 16


class OnDevice(Tensor):
    """Bounds that say they are on a GPU, and count how often the host waits for their values."""

    reads = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def cpu(self) -> Tensor:
        OnDevice.reads += 1
        return self.as_subclass(Tensor).clone()

    def tolist(self) -> list[int]:
        raise AssertionError("read past the cache")


def bounds(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_device(*values: int) -> Tensor:
    return bounds(*values).as_subclass(OnDevice)


def thd(cu_seqlens: Tensor, **fields: Any) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, **fields)


@pytest.fixture(params=[bounds, on_device], ids=["cpu", "device"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_bounds_that_were_filled_anew_are_read_anew(make: Any):
    params = thd(make(0, 5, SEQ_LEN))
    first = documents_of(params, seq_len=SEQ_LEN)
    params.cu_seqlens_q[1] = 9
    assert documents_of(params, seq_len=SEQ_LEN).tolist() == [0, 9, SEQ_LEN]
    assert first.tolist() == [0, 5, SEQ_LEN]


def test_other_bounds_on_the_same_object_are_read(make: Any):
    params = thd(make(0, 5, SEQ_LEN))
    documents_of(params, seq_len=SEQ_LEN)
    params.cu_seqlens_q = params.cu_seqlens_kv = make(0, 7, SEQ_LEN)
    assert documents_of(params, seq_len=SEQ_LEN).tolist() == [0, 7, SEQ_LEN]


def test_other_padded_bounds_and_other_keys_are_read(make: Any):
    params = thd(make(0, 5, 11))
    params.cu_seqlens_q_padded = make(0, 8, SEQ_LEN)
    documents_of(params, seq_len=SEQ_LEN)
    params.cu_seqlens_q_padded[1] = 6
    assert documents_of(params, seq_len=SEQ_LEN).tolist() == [0, 5, 6, 12, SEQ_LEN]
    params.cu_seqlens_kv = bounds(0, 6, 11)
    with pytest.raises(ValueError, match="cu_seqlens_kv must be equal to cu_seqlens_q"):
        documents_of(params, seq_len=SEQ_LEN)


def test_another_length_is_checked_too(make: Any):
    params = thd(make(0, 5, SEQ_LEN))
    documents_of(params, seq_len=SEQ_LEN)
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\] must be the sequence length 32, got 16"):
        documents_of(params, seq_len=2 * SEQ_LEN)


def test_memory_that_torch_does_not_watch():
    filled_by_the_loader = np.array([0, 5, SEQ_LEN], dtype=np.int32)
    params = thd(torch.from_numpy(filled_by_the_loader))
    documents_of(params, seq_len=SEQ_LEN)
    filled_by_the_loader[1] = 9
    assert documents_of(params, seq_len=SEQ_LEN).tolist() == [0, 9, SEQ_LEN]


def test_bounds_of_inference_mode():
    with torch.inference_mode():
        params = thd(bounds(0, 5, SEQ_LEN))
        documents_of(params, seq_len=SEQ_LEN)
        params.cu_seqlens_q[1] = 9
    assert documents_of(params, seq_len=SEQ_LEN).tolist() == [0, 9, SEQ_LEN]


def reads_of_two_batches(dense: bool) -> int:
    """How often two layers, in two batches, wait for the values of the bounds."""
    config = dataclasses.replace(tiny_gpt.SPARSE, dense_layers=(1, 2) if dense else ())
    with tiny_gpt.parallel_job(config):
        layers = [core_attention(number) for number in (1, 2)]
        for values in ((0, 5, SEQ_LEN), (0, 9, SEQ_LEN)):
            params = thd(on_device(*values))
            for layer in layers:
                layer(*(torch.randn(SEQ_LEN, 4, 8) for _ in range(3)), packed_seq_params=params)
    return OnDevice.reads


def core_attention(layer_number: int) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_mtraining.megatron import MTrainingCoreAttention

    return MTrainingCoreAttention(
        config=tiny_gpt.transformer_config(),
        layer_number=layer_number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
    )


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_layers_wait_for_the_device_once_per_batch(dense: bool):
    """Selection and ring get bounds on the CPU: reading those of the device anywhere else raises."""
    assert run_on_ranks(reads_of_two_batches, 1, dense=dense) == [2]
