"""torch.compile with ``fullgraph=True`` over attention: the same bits both ways, and the same sentences."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import MTrainingConfig, SequenceLayout, VerticalSlashIndex, select, sparse_attention
from megatron_mtraining.testing.error_budget import run_with_gradients

SEQ_LEN = 150
SMALL = {"dense_below": 0, "block_size": 16, "num_probe_rows": 16, "sink_tokens": 4, "local_blocks": 1}
PATTERNS = {
    "vertical_slash": MTrainingConfig.algorithm_1(**SMALL, max_vertical=8, max_slash=2),
    "moba": MTrainingConfig(**SMALL, pattern="moba", moba_chunk=32, moba_top_k=2),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, SEQ_LEN, heads, 8, generator=generator) for heads in (4, 2, 2)]


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("bounds", [None, (0, 33, 34, SEQ_LEN)])
def test_a_whole_graph_gives_the_same_bits(pattern, bounds):
    query, key, value = inputs()
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    index = select(query, key, PATTERNS[pattern], cu_seqlens=cu_seqlens)

    def attention(query, key, value):
        return sparse_attention(query * 2.0, key, value + 1.0, index=index, cu_seqlens=cu_seqlens, softmax_scale=0.3)

    given = {"grad_out": torch.randn(1, SEQ_LEN, 4, 8), "grad_lse": torch.randn(1, 4, SEQ_LEN)}
    expected = run_with_gradients(attention, query, key, value, **given)
    for name, tensor in run_with_gradients(compiled(attention), query, key, value, **given).items():
        assert torch.equal(tensor, expected[name]), name


def test_one_result_alone_may_be_used():
    query, key, value = inputs()
    index = select(query, key, PATTERNS["vertical_slash"])
    for name in ("out", "lse"):

        def loss(query, name=name):
            return getattr(sparse_attention(query, key, value, index=index), name).square().sum()

        gradients = []
        for function in (loss, compiled(loss)):
            given = query.clone().requires_grad_()
            gradients += torch.autograd.grad(function(given), given)
        assert torch.equal(*gradients), name


def test_what_does_not_fit_is_refused_when_the_graph_runs():
    query, key, value = inputs()
    good = select(query, key, PATTERNS["vertical_slash"])
    bad = VerticalSlashIndex(good.vertical, good.num_vertical + 99, good.slash, good.num_slash, block_size=16)
    attention = compiled(lambda query: sparse_attention(query, key, value, index=bad).out)
    with pytest.raises(ValueError, match="index.num_vertical must be from 0 to the width"):
        attention(query)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"config": MTrainingConfig(block_size=64)}, "index.block_size must be the block_size 64 of config, got 16"),
        ({"num_valid": torch.tensor([SEQ_LEN + 1])}, "num_valid"),
        ({"layout": SequenceLayout("contiguous", seq_len=160, cp_size=1, block_size=16)}, "query.shape"),
    ],
)
def test_what_one_operator_does_not_take_is_refused_as_without_a_compiler(given, sentence):
    query, key, value = inputs()
    index = select(query, key, PATTERNS["vertical_slash"])
    for compiler in (lambda function: function, lambda function: torch.compile(function, backend="eager")):
        with pytest.raises(ValueError, match=sentence):
            compiler(lambda query: sparse_attention(query, key, value, index=index, **given).out)(query)
