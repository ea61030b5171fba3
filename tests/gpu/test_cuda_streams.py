"""Tables that a call keeps for later ones serve these on every stream, and in a CUDA graph."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron_mtraining import vertical_slash_attention
from megatron_mtraining.megatron.token_split import TokenSplit
from megatron_mtraining.transport.index_digest import index_digest

from .cases import Case

pytestmark = pytest.mark.gpu


def attention_of(case, inputs, index):
    return functools.partial(vertical_slash_attention, *inputs, index, cu_seqlens=case.cu_seqlens, backend="cuda")


def tables_on(stream, case, index):
    """What a stream computes from tables that are copied or made in the first call."""
    with torch.cuda.stream(stream), torch.no_grad():
        inputs = [torch.full_like(tensor, 0.5) for tensor in case.inputs()]
        order = TokenSplit("striped", 64, None).rank_order(case.seq_len, 2, torch.device("cuda", 0))
        return index_digest(index), order + 0, attention_of(case, inputs, index)().out


def test_a_stream_does_not_read_what_another_has_not_copied_yet():
    """The first is busy for a while, and what it takes for tables held other numbers before."""
    case = Case(seq_len=1408, num_heads=4, num_kv_heads=2, head_dim=64)
    index = case.index()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        for power in range(6, 20):
            torch.full((2**power,), -1, dtype=torch.int64, device="cuda")
        torch.cuda._sleep(1_000_000_000)
    slow, fast = tables_on(first, case, index), tables_on(second, case, index)
    second.synchronize()
    fast = [result.clone() for result in fast]
    torch.cuda.synchronize()
    for ours, expected in zip(fast, slow, strict=True):
        assert torch.equal(ours, expected)


def test_a_graph_captured_behind_a_warm_up_replays_attention():
    case = Case(seq_len=1472, num_heads=4, num_kv_heads=2, head_dim=64)
    inputs, index, stream, graph = case.inputs(), case.index(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    attention = attention_of(case, inputs, index)
    torch.cuda.synchronize()
    with torch.no_grad():
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            inputs[0].clone()  # torch warns of a graph without a node
            with pytest.raises(RuntimeError, match="A CUDA graph must be captured on a stream on which the same"):
                attention()
        with torch.cuda.stream(stream):
            attention()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = attention().out
        for tensor, other in zip(inputs, case.inputs(), strict=True):
            tensor.copy_(other)
        graph.replay()
        assert torch.equal(out, attention().out)
