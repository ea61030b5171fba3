"""torch.compile over the CUDA kernels: the same bits, forward and backward, and operators that trace whole."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import MTrainingConfig, sparse_attention
from megatron_mtraining.testing.error_budget import run_with_gradients

from .cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("bounds", [None, (0, 70, 71, 300)])
def test_compiled_attention_gives_the_same_bits(bounds):
    """Inside one graph with work around it: ``fullgraph`` fails at the first thing that dynamo cannot trace."""
    case = Case(seq_len=300, num_heads=4, num_kv_heads=2, head_dim=64, bounds=bounds)
    index, inputs, (grad_out, grad_lse) = case.index(), case.inputs(), case.gradients()
    options = {"index": index, "cu_seqlens": case.cu_seqlens, "config": MTrainingConfig(backend="cuda")}

    def attention(query, key, value):
        return sparse_attention(query * 2.0, key, value + 1.0, **options)

    given = {"grad_out": grad_out, "grad_lse": grad_lse}
    expected = run_with_gradients(attention, *inputs, **given)
    ours = run_with_gradients(torch.compile(attention, backend="aot_eager", fullgraph=True), *inputs, **given)
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def test_an_operator_traces_whole():
    """Alone, without the operator of the whole attention around it."""
    from megatron_mtraining.backends.cuda import row_operators

    case = Case(seq_len=300, num_heads=4, num_kv_heads=2, head_dim=64)
    out, (grad_out, grad_lse) = case.inputs()[0], case.gradients()

    def delta(grad_out, out, grad_lse):
        return row_operators.softmax_delta(grad_out * 2.0, out, grad_lse) + 1.0

    compiled = torch.compile(delta, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(grad_out, out, grad_lse), delta(grad_out, out, grad_lse))
