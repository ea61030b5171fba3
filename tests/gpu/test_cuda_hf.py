"""Sparse attention inside transformers on a GPU: bfloat16 autocast of float32 weights, and recomputation."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from megatron_mtraining import MTrainingConfig, hf

pytestmark = pytest.mark.gpu

LENGTH = 6000


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=2, max_position_embeddings=8192, **sizes)
    return LlamaForCausalLM(config).cuda().train()


def step(model: LlamaForCausalLM) -> tuple[float, list[torch.Tensor]]:
    ids = torch.randint(0, 97, (1, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


def test_every_key_selected_is_dense_attention(model):
    hf.configure(model, MTrainingConfig(pattern="dense"))
    dense_loss, dense = step(model)
    hf.configure(model, MTrainingConfig(dense_below=0, dense_above=1e-6))
    metrics = hf.LayerMetrics(rows=(LENGTH - 1,))
    with hf.observe(metrics):
        loss, gradients = step(model)
    assert metrics.density == {1: 1.0, 2: 1.0}
    assert loss == pytest.approx(dense_loss, rel=1e-4)
    for ours, expected in zip(gradients, dense, strict=True):
        assert (ours - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("pattern", ["vertical_slash", "moba", "xattention"])
def test_recomputation_trains_alike(model, pattern):
    hf.configure(model, MTrainingConfig(pattern=pattern, dense_below=0, moba_chunk=512, moba_top_k=2))
    loss, gradients = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed_loss, recomputed = step(model)
    assert recomputed_loss == loss
    for ours, expected in zip(recomputed, gradients, strict=True):
        assert (ours - expected).norm() <= 1e-3 * expected.norm()
