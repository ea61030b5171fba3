"""Tables that a call keeps for later ones serve these on every stream, and in a CUDA graph."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron_mtraining import MTrainingConfig, sparse_attention
from megatron_mtraining.transport.agreement import index_digest

from .cases import Case

pytest.importorskip("megatron.core")
from megatron_mtraining.megatron.split import TokenSplit

pytestmark = pytest.mark.gpu

SPLIT = TokenSplit("striped", 64, None)


def attention_of(case, inputs, index):
    return functools.partial(
        sparse_attention, *inputs, index=index, cu_seqlens=case.cu_seqlens, config=MTrainingConfig(backend="cuda")
    )


def attention_and_tables(case, inputs, index):
    """What is computed from tables that are copied or made in the first call."""
    order = SPLIT.rank_order(case.seq_len, 2, torch.device("cuda", 0))
    return index_digest(index), order + 0, attention_of(case, inputs, index)().out


def test_a_stream_does_not_read_what_another_has_not_copied_yet():
    """The first is busy for a while, and what it takes for tables held other numbers before."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    known, new = (Case(seq_len=seq_len, num_heads=4, num_kv_heads=2, head_dim=64) for seq_len in (2688, 1408))
    given = {case: (case.inputs(), case.index()) for case in (known, new)}
    for stream in (first, second):  # kernels are loaded, which waits for the device, and memory is there
        with torch.cuda.stream(stream):
            attention_and_tables(known, *given[known])
            scratch = [torch.full((2**power,), -1, device="cuda") for power in range(4, 22) for _ in range(3)]
    del scratch
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(2_000_000_000)  # a second
        slow = attention_and_tables(new, *given[new])
    with torch.cuda.stream(second):
        fast = attention_and_tables(new, *given[new])
    assert not first.query(), "the host waited for the first stream, so nothing is tested"
    torch.cuda.synchronize()
    for ours, expected in zip(fast, slow, strict=True):
        assert torch.equal(ours, expected)


def test_a_graph_captured_behind_a_call_replays_attention():
    case = Case(seq_len=1472, num_heads=4, num_kv_heads=2, head_dim=64)
    inputs, index, stream, graph = case.inputs(), case.index(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    attention = attention_of(case, inputs, index)
    with torch.no_grad():
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            inputs[0].clone()  # torch warns of a graph without a node
            with pytest.raises(RuntimeError, match="A CUDA graph must be captured behind the same call"):
                attention()
        attention()
        with torch.cuda.graph(graph, stream=stream):
            out = attention().out
        for tensor, other in zip(inputs, case.inputs(), strict=True):
            tensor.copy_(other)
        graph.replay()
        assert torch.equal(out, attention().out)
