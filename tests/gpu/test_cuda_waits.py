"""The host never waits for the device in a warm layer: it runs ahead of it, and the device finds its next launch."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import MTrainingConfig, select, sparse_attention

from .cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]


@pytest.mark.parametrize("bounds", [None, (0, 700, 701, 2048)])
@pytest.mark.parametrize(
    "config",
    [
        MTrainingConfig.algorithm_1(dense_below=64, max_vertical=64, max_slash=8),
        MTrainingConfig(dense_below=64),
        MTrainingConfig(dense_below=64, max_density=0.2),
    ],
    ids=["top_p", "cost", "bounded"],
)
def test_the_host_never_waits_for_a_step(config, bounds):
    """Whatever torch knows to wait raises; and two steps are launched while the device still sleeps.

    The bounds of documents are on the CPU, where they are read.
    """
    case = Case(seq_len=2048, num_heads=4, num_kv_heads=2, head_dim=64, bounds=bounds)
    inputs, (grad_out, _) = [tensor.requires_grad_() for tensor in case.inputs()], case.gradients()
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)

    def step():
        index = select(*inputs[:2], config, cu_seqlens=cu_seqlens)
        out = sparse_attention(*inputs, index=index, cu_seqlens=cu_seqlens, config=MTrainingConfig(backend="cuda")).out
        torch.autograd.grad(out, inputs, grad_out)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # two seconds or more
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step()
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
