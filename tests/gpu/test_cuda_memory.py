"""What sparsity costs in memory at a million tokens: an index of kilobytes, and nothing of blocks x blocks for it."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, select, sparse_attention
from megatron_mtraining.transport.process_group import unowned

pytestmark = pytest.mark.gpu

SEQ_LEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2**20, 32, 4, 64
MIB = 2**20


@pytest.fixture(scope="module")
def inputs():
    """Query, key and value of a million tokens."""
    if torch.cuda.mem_get_info()[0] < 40 * 1024 * MIB:
        pytest.skip("needs 40 GiB of free GPU memory")
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    yield [torch.randn(1, SEQ_LEN, h, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for h in heads]
    torch.cuda.empty_cache()


def num_bytes(index: VerticalSlashIndex) -> int:
    tables = (index.vertical, index.num_vertical, index.slash, index.num_slash)
    return sum(table.numel() * table.element_size() for table in tables)


@pytest.mark.parametrize("estimator", ["last_window", "probe_windows"])
def test_selection_needs_megabytes(inputs, estimator):
    """Two masses of float32 per token and head are 256 MiB; a mask of blocks x blocks would be 8 GiB."""
    config = MTrainingConfig.algorithm_1(estimator=estimator, num_probe_windows=8, dense_below=0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index = select(*inputs[:2], config)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 1024 * MIB
    assert num_bytes(index) <= MIB
    assert torch.cuda.memory_allocated() - before <= 2 * MIB


def test_a_layer_saves_kilobytes_beside_what_dense_attention_saves(inputs):
    lists = [[[0, *range(5, SEQ_LEN, SEQ_LEN // 1000)]] * NUM_HEADS], [[list(range(128))] * NUM_HEADS]
    index = VerticalSlashIndex.from_lists(*lists, seq_len=SEQ_LEN, device="cuda")
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = sparse_attention(*leaves, index=index, config=MTrainingConfig(backend="cuda"))
    for tensor in (*leaves, result.out, result.lse):
        saved.pop(tensor.data_ptr(), None)
    assert 0 < sum(tensor.numel() * tensor.element_size() for tensor in saved.values()) <= MIB


def test_record_stream_passes_by_what_a_transfer_is_given():
    """Else memory freed on the host comes back only after the stream of the transfers, however far it lags behind."""
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
    addresses = []
    for given in (unowned, torch.Tensor.detach):
        tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        given(tensor).record_stream(busy)
        address = tensor.data_ptr()
        del tensor
        addresses.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address)
    assert not busy.query()
    assert addresses == [True, False]
