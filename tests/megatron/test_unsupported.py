"""Every unsupported option is an error in one sentence that names the option and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.megatron import MTrainingCoreAttention, packed_seq_params, runtime
from megatron_mtraining.megatron.unsupported import SHARING, check
from megatron_mtraining.transport import RingGroups

from .fakes import Group
from .split import fresh_process


def start(monkeypatch: pytest.MonkeyPatch, *, cp_size: int = 1, **options: Any) -> None:
    """A runtime without process groups: errors come before anything is communicated."""
    config = MTrainingConfig(**{"block_size": 8, "layout": "striped", "schedule": "hierarchical", **options})
    made = runtime.Runtime(
        config=config, cp_group=Group(cp_size), ring_groups=RingGroups(cp=Group(cp_size)), inner_size=1
    )
    fresh_process(monkeypatch, runtime=made)


def transformer_config(cp_size: int = 1, **attributes: Any) -> TransformerConfig:
    """A valid config with attributes set afterwards: Megatron has its own conditions for many of them."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, context_parallel_size=cp_size
    )
    for name, value in attributes.items():
        setattr(config, name, value)
    return config


def build(config: TransformerConfig | None = None, **arguments: Any) -> MTrainingCoreAttention:
    defaults = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return MTrainingCoreAttention(config=config or transformer_config(), **(defaults | arguments))


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout must be 0, got 0.1. Pass --attention-dropout 0."),
        ({"window_size": (128, 0)}, r"window_size must be None in layer 1, got \(128, 0\)"),
        ({"window_size": (128, 0), "window_attn_skip_freq": 2}, "window_size must be None in layer 1"),
        ({"window_size": (128, 0), "window_attn_skip_freq": [1, 0]}, "window_size must be None in layer 1"),
        ({"softmax_type": "learnable"}, "softmax_type must be 'vanilla', got 'learnable'"),
        ({"softmax_type": "off-by-one"}, "softmax_type must be 'vanilla', got 'off-by-one'"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention must be False, got True"),
        ({"fp8_multi_head_attention": True}, "fp8_multi_head_attention must be False, got True"),
        ({"qk_clip": True}, "qk_clip must be False, got True"),
        ({"log_max_attention_logit": True}, "log_max_attention_logit must be False, got True"),
        ({"multi_latent_attention": True}, "multi_latent_attention must be False, got True"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant must be None, got dsa"),
        ({"batch_invariant_mode": True}, "batch_invariant_mode must be False, got True"),
        ({"flash_decode": True}, "flash_decode must be False, got True"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel must be False, got True"),
        ({"dynamic_context_parallel": True}, "dynamic_context_parallel must be False, got True"),
        ({"mrope_section": [8, 4, 4]}, r"mrope_section must be None, got \[8, 4, 4\]"),
        (
            {"context_parallel_size": 2},
            r"context_parallel_size must be the size 1 of the group that initialize\(\) saw",
        ),
        ({"cuda_graph_impl": "transformer_engine"}, "cuda_graph_impl must be 'none' or leave attention out"),
        ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl must be 'none' or leave attention out"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
            r"offload_modules must be without core_attn, got \['core_attn'\]. Use recompute_modules=core_attn.",
        ),
    ],
    ids=str,
)
def test_options_of_the_transformer_config(attributes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch):
    start(monkeypatch)
    with pytest.raises(ValueError, match=sentence):
        build(transformer_config(**attributes))


def test_a_list_is_shared_on_one_rank_only():
    shared = MTrainingConfig(index_sharing="kv_group")
    check(SHARING, given=transformer_config(num_query_groups=2, tensor_model_parallel_size=2), config=shared)
    spread = transformer_config(num_query_groups=2, tensor_model_parallel_size=4)
    check(SHARING, given=spread, config=MTrainingConfig(index_sharing="head"))
    with pytest.raises(ValueError, match="index_sharing must be head with more .*, got kv_group with 4 and 2. The sel"):
        check(SHARING, given=spread, config=shared)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"attention_type": "cross"}, "attention_type must be 'self', got 'cross'"),
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type must be causal, got AttnMaskType.padding"),
        ({"attn_mask_type": AttnMaskType.no_mask}, "attn_mask_type must be causal, got AttnMaskType.no_mask"),
        ({"attention_dropout": 0.5}, "attention_dropout must be 0, got 0.5"),
        ({"k_channels": 192, "v_channels": 128}, "k_channels must be None, got int"),
    ],
    ids=str,
)
def test_what_the_layer_asks_for(arguments: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch):
    start(monkeypatch)
    with pytest.raises(ValueError, match=sentence):
        build(**arguments)


def test_what_only_megatrons_own_split_can_do(monkeypatch: pytest.MonkeyPatch):
    start(monkeypatch, cp_size=2)
    sentence = "mtp_hsm must be False with layout=striped on 2 ranks, got True. Hidden .* Use layout=zigzag, which is"
    with pytest.raises(ValueError, match=sentence):
        build(transformer_config(cp_size=2, mtp_hsm=True))
    start(monkeypatch, cp_size=2, layout="zigzag")
    assert build(transformer_config(cp_size=2, mtp_hsm=True))
    start(monkeypatch)
    assert build(transformer_config(mtp_hsm=True))


@pytest.mark.parametrize(
    "attributes",
    [
        {"window_size": (128, 0), "window_attn_skip_freq": [0, 1]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [SimpleNamespace(name="mlp")]},
        {"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]},
        {"apply_query_key_layer_scaling": True},
        {"mtp_num_layers": 1},
        {"is_hybrid_model": True},
    ],
    ids=str,
)
def test_what_does_not_touch_this_layer_is_allowed(attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    start(monkeypatch)
    if hasattr(transformer_config(), "cuda_graph_modules") and "cuda_graph_scope" in attributes:
        attributes = attributes | {"cuda_graph_modules": attributes["cuda_graph_scope"]}
    assert build(transformer_config(**attributes))


def test_a_model_before_initialize(monkeypatch: pytest.MonkeyPatch):
    fresh_process(monkeypatch)
    with pytest.raises(
        RuntimeError, match="initialize must be called before a model is built, got no call. Call megatron"
    ):
        build()


def test_an_estimator_that_nobody_registered(monkeypatch: pytest.MonkeyPatch):
    """At the start, not after a dense warm-up."""
    fresh_process(monkeypatch)
    with pytest.raises(ValueError, match=r"estimator must be one of last_window, .*, got 'lucky'\. Register one"):
        runtime.initialize(MTrainingConfig(estimator="lucky", dense_warmup_steps=1000))


def qkv(packed: bool = False) -> tuple[torch.Tensor, ...]:
    shape = (16, 4, 8) if packed else (16, 1, 4, 8)
    return tuple(torch.randn(shape) for _ in range(3))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 16, 16)},
            r"attention_mask must be None, got a tensor of shape \(1, 1, 16, 16\). .*--no-create-attention-mask-in-",
        ),
        (
            {"attn_mask_type": AttnMaskType.no_mask},
            "attn_mask_type must be causal, got .*no_mask. Decoding is not supp",
        ),
        ({"attention_bias": torch.ones(1, 4, 16, 16)}, "attention_bias must be None, got a tensor of shape"),
        ({"num_splits": 2}, "num_splits must be None, got int"),
        (
            {"packed_seq_params": PackedSeqParams(qkv_format="bshd")},
            "packed_seq_params.qkv_format must be 'sbhd' for input of four dimensions, got 'bshd'",
        ),
        (
            {"packed_seq_params": packed_seq_params(torch.tensor([0, 16], dtype=torch.int32))},
            "packed_seq_params.qkv_format must be 'sbhd' for input of four dimensions, got 'thd'",
        ),
        (
            {"packed_seq_params": PackedSeqParams(cu_seqlens_q=torch.tensor([0, 9, 16], dtype=torch.int32))},
            r"packed_seq_params.cu_seqlens_q must be None for input of four dimensions, got tensor\(\[ 0,  9, 16\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_a_call(arguments: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch):
    start(monkeypatch)
    attention = build()
    with pytest.raises(ValueError, match=sentence):
        attention(*qkv(), **({"attention_mask": None} | arguments))


def bounds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "params", "attributes", "sentence"),
    [
        ({}, None, {}, "packed_seq_params must be given with cu_seqlens for packed input, got None"),
        ({}, PackedSeqParams(qkv_format="thd"), {}, "packed_seq_params must be given with cu_seqlens"),
        (
            {},
            PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=bounds(0, 16)),
            {},
            "packed_seq_params.qkv_format must be 'thd', got 'sbhd'",
        ),
        (
            {},
            PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds(0, 8, 16), cu_seqlens_kv=bounds(0, 9, 16)),
            {},
            r"cu_seqlens_kv must be equal to cu_seqlens_q, got \[0, 9, 16\]",
        ),
        (
            {},
            PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds(0, 16), local_cp_size=1),
            {},
            "packed_seq_params.local_cp_size must be None, got 1. Hybrid",
        ),
        (
            {"layout": "zigzag", "cp_size": 2},
            packed_seq_params(bounds(0, 32)),
            {},
            "layout must be striped, node_striped, rotated or contiguous for packed documents on 2 ranks, got zigzag",
        ),
        (
            {"cp_size": 2},
            packed_seq_params(bounds(0, 32)),
            {"apply_rope_fusion": True},
            "apply_rope_fusion must be False for packed documents on 2 ranks, got True. .*--no-rope-fusion",
        ),
        ({}, packed_seq_params(bounds(0, 12)), {}, r"cu_seqlens\[-1\] must be the sequence length 16, got 12"),
    ],
    ids=["none", "no-bounds", "format", "keys", "hybrid", "zigzag", "fused-rope", "short"],
)
def test_packs_that_cannot_be_right(
    options: dict[str, Any],
    params: PackedSeqParams | None,
    attributes: dict[str, Any],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
):
    cp_size = options.get("cp_size", 1)
    start(monkeypatch, **options)
    attention = build(transformer_config(cp_size=cp_size, **attributes))
    with pytest.raises(ValueError, match=sentence):
        attention(*qkv(packed=True), None, packed_seq_params=params)


def test_a_length_that_the_layout_does_not_divide(monkeypatch: pytest.MonkeyPatch):
    start(monkeypatch, cp_size=3)
    attention = build(transformer_config(cp_size=3))
    query, key, value = (tensor[:12] for tensor in qkv())
    with pytest.raises(
        ValueError, match="seq_len must be a multiple of 24 for the striped layout over 3 ranks, got 36"
    ):
        attention(query, key, value, None)


def test_warm_up_without_a_step_count(monkeypatch: pytest.MonkeyPatch):
    start(monkeypatch, dense_warmup_steps=3)
    with pytest.raises(
        ValueError, match="dense_warmup_steps must be 0 unless steps are counted, got 3. .*set_training"
    ):
        build()(*qkv(), None)
