"""What Megatron's layers keep for the backward is what the planner counts, tensor for tensor but for norms and rope.

Those two are TransformerEngine's own on a GPU; the local modules of a CPU keep more for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mtraining.planner.memory import LayerActivations
from megatron_mtraining.planner.model import ModelShape
from megatron_mtraining.planner.plan import Plan

from . import tiny_gpt
from .ranks import run_on_ranks

SHAPE = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=tiny_gpt.VOCAB,
)
RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def kept_bytes() -> dict[str, int]:
    """Of the second of two layers, in each way to recompute."""
    with tiny_gpt.parallel_job(cp_size=1):
        return {name: _forward(2, **options) - _forward(1, **options) for name, options in RECOMPUTE.items()}


def _forward(num_layers: int, **options: object) -> int:
    """Bytes of every storage that autograd keeps, parameters and what norms and rope keep left out."""
    config = tiny_gpt.transformer_config(
        num_layers=num_layers,
        hidden_size=SHAPE.hidden_size,
        ffn_hidden_size=SHAPE.ffn_hidden_size,
        kv_channels=SHAPE.head_dim,
        params_dtype=torch.bfloat16,
        bf16=True,
        bias_activation_fusion=True,
        **options,
    )
    model = tiny_gpt.build(tiny_gpt.sparse_spec(), config=config, parallel_output=True).bfloat16()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # the tensors too, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        address, is_index = tensor.untyped_storage().data_ptr(), tensor.dtype == torch.int32
        if address not in parameters and not is_index and not _is_of_norm_or_rope(tensor):
            kept[address] = tensor
        return tensor

    whole = tiny_gpt.batch()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(whole["tokens"], whole["position_ids"], None, labels=whole["labels"])
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _is_of_norm_or_rope(tensor: Tensor) -> bool:
    per_token = tensor.shape[2:]
    return tensor.dim() in (3, 4) and per_token in ((1,), (SHAPE.hidden_size,), (1, SHAPE.head_dim))


def test_layers_keep_what_is_counted():
    config = tiny_gpt.SPARSE
    plan = Plan(seq_len=tiny_gpt.SEQ_LEN, pack_width=config.sink_tokens + config.max_vertical)
    layer = LayerActivations.of(SHAPE, plan)
    measured = run_on_ranks(kept_bytes, 1)[0]
    hidden_of = {"none": 4, "selective": 3, "full": 1}  # of the size of a hidden state, left out of what is measured
    assert measured == {name: layer.saved(name) - count * layer.hidden for name, count in hidden_of.items()}
