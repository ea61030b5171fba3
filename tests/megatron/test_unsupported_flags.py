"""Each unsupported flag is an error at start-up, which names the flag and what to do."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.megatron import unsupported
from megatron_mtraining.megatron.unsupported import FLAGS, OFF, check_arguments
from megatron_mtraining.planner import model_of_flags

PACKED = {"sft": True}
SEVERAL = {"context_parallel_size": 2}
GROUPS = {"group_query_attention": True, "num_query_groups": 2, "config": {"index_sharing": "kv_group"}}


def check(layout: str = "striped", config: dict[str, Any] | None = None, **flags: Any) -> None:
    """The check of a validated command line that has these flags beside ordinary ones."""
    ordinary = {"seq_length": 4096, "num_layers": 4, "context_parallel_size": 1, "attention_dropout": 0.0}
    check_arguments(Namespace(**(ordinary | flags)), MTrainingConfig(layout=layout, **(config or {})))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "rotated", "node_striped"])
@pytest.mark.parametrize("cp_size", [1, 4])
def test_an_ordinary_run_is_accepted(layout: str, cp_size: int):
    check(
        layout,
        context_parallel_size=cp_size,
        pipeline_model_parallel_size=4,
        mtp_num_layers=1,
        hybrid_layer_pattern="M*M*",
        hierarchical_context_parallel_sizes=[2, 2],
        position_embedding_type="rope",
        transformer_impl="transformer_engine",
        apply_rope_fusion=True,
        cuda_graph_impl="none",
        config={"dense_layers": (2, 4)},
    )
    check_arguments(Namespace(), MTrainingConfig(layout=layout))


def test_an_estimator_that_nobody_registered_is_refused():
    with pytest.raises(ValueError, match="estimator must be one of last_window, probe_windows.*, got 'none'"):
        check(config={"estimator": "none"})


def test_kernels_that_cannot_run_are_refused_before_the_first_step():
    with pytest.raises(ValueError, match="--mtraining-backend must be auto or reference here, got cuda. The CUDA kern"):
        check(config={"backend": "cuda"}, params_dtype=torch.float32)


REFUSED = [
    (
        GROUPS | {"tensor_model_parallel_size": 4},
        "--mtraining-index-sharing must be head .* heads, got kv_group with 4",
    ),
    ({"use_legacy_models": True}, "--use-legacy-models must be absent, got it. Legacy models have"),
    ({"multi_latent_attention": True}, "--multi-latent-attention must be absent, got it. Keys and values of one"),
    ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant must be absent, got dsa. Use"),
    ({"fp8_dot_product_attention": True}, "--fp8-dot-product-attention must be absent, got it."),
    ({"fp8_multi_head_attention": True}, "--fp8-multi-head-attention must be absent, got it."),
    ({"qk_clip": True}, "--qk-clip must be absent, got it. The largest"),
    ({"log_max_attention_logit": True}, "--log-max-attention-logit must be absent, got it. The largest"),
    ({"batch_invariant_mode": True}, "--batch-invariant-mode must be absent, got it. It needs Megatron's flash"),
    ({"flash_decode": True}, "--flash-decode must be absent, got it. This is attention for training"),
    ({"hybrid_context_parallel": True}, "--hybrid-context-parallel must be absent, got it. The context-parallel"),
    ({"dynamic_context_parallel": True}, "--dynamic-context-parallel must be absent, got it. The context-parallel"),
    ({"mrope_section": [8, 4, 4]}, r"--mrope-section must be absent, got \[8, 4, 4\]. Use rope or yarn"),
    ({"attention_dropout": 0.1}, "--attention-dropout must be 0, got 0.1. Pass --attention-dropout 0."),
    ({"window_size": (128, 0)}, r"--window-size must be absent, got \(128, 0\) in layers \[1, 2, 3, 4\]. Slashes"),
    ({"window_size": (128, 0), "window_attn_skip_freq": 2}, r"got \(128, 0\) in layers \[1, 3\]. Slashes"),
    ({"softmax_type": "learnable"}, "--softmax-type must be vanilla, got learnable. Learned sinks"),
    ({"position_embedding_type": "mrope"}, "--position-embedding-type must be rope, .* or none, got mrope. Posi"),
    ({"position_embedding_type": "relative"}, "--position-embedding-type must be rope, .* or none, got relative."),
    ({"transformer_impl": "inference_optimized"}, "--transformer-impl must be local or transformer_engine, got inf"),
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl must be none, or leave attention out .*, got local. Which"),
    ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["mlp"]}, "--cuda-graph-impl must .*full_iteration"),
    (
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "mlp_norm"]},
        r"--offload-modules must be without core_attn, got \['core_attn', 'mlp_norm'\]. Pass --recompute-modules",
    ),
    (
        {"seq_length": 4160, **SEVERAL},
        "--seq-length must be a multiple of .*, got 4160, which is no multiple of 128. Pass",
    ),
    ({"seq_length": 4224, "layout": "zigzag", **SEVERAL}, "--seq-length must .* 4224, which is no multiple of 256."),
    ({"config": {"dense_layers": (2, 5)}}, r"--mtraining-dense-layers must be layers that .*, got \[5\]. Pass numbers"),
    (
        {"hybrid_layer_pattern": "M*|-*/M*", "config": {"dense_layers": (2, 3, 4)}},
        r"--mtraining-dense-layers must be attention layers of .* from 1, got \[3\]. Pass the places of its \*.",
    ),
    ({"hybrid_override_pattern": "M*M*", "config": {"dense_layers": (1,)}}, r"--mtraining-dense-layers .* got \[1\]."),
    (
        {"hierarchical_context_parallel_sizes": [2, 2, 2], "context_parallel_size": 8},
        r"--hierarchical-context-parallel-sizes must be two sizes, .*, got \[2, 2, 2\]. Pass two, or leave it out",
    ),
    ({"reset_attention_mask": True}, "--reset-attention-mask must be absent, got it. .*-inter-document-masking, in"),
    (
        {"create_attention_mask_in_dataloader": True},
        "--no-create-attention-mask-in-dataloader must be passed, got a mask of seq x seq. Attention is causal",
    ),
    ({**PACKED, **SEVERAL, "layout": "zigzag"}, "--mtraining-layout must be striped, .*, got zigzag. Megatron's zig"),
    (
        {"dataloader_inter_document_masking": True, "layout": "zigzag", **SEVERAL},
        "--mtraining-layout must be striped, .* or contiguous for packed documents on several ranks, got zigzag.",
    ),
    ({**PACKED, **SEVERAL, "apply_rope_fusion": True}, "--no-rope-fusion must be passed for packed .*, got it. The"),
    (
        {**PACKED, "overlap_moe_expert_parallel_comm": True},
        "--overlap-moe-expert-parallel-comm must be absent for packed documents, got it. Megatron-LM's schedule for",
    ),
    ({"mtp_hsm": True, **SEVERAL}, "--mtp-hsm must be absent in this layout, got it. .* --mtraining-layout zigzag"),
    ({"perform_rl_step": True, **SEVERAL}, "--perform-rl-step must be absent in this .* --mtraining-layout zigzag"),
    ({"logits_load_dir": "a/b", **SEVERAL}, "--logits-load-dir must be .*, got a/b. .* --mtraining-layout zigzag"),
    ({"logits_save_dir": "a/b", **SEVERAL}, "--logits-save-dir must be .*, got a/b. .* --mtraining-layout zigzag"),
    ({"use_kitchen_attention": True}, "--use-kitchen-attention must be absent, got it. Both replace"),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED, ids=str)
def test_a_flag_that_would_be_wrong(flags: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        check(**flags)


@pytest.mark.parametrize(
    "flags",
    [
        {**GROUPS, "tensor_model_parallel_size": 2},
        {"mtp_hsm": True, "layout": "zigzag", **SEVERAL},
        {"perform_rl_step": True, "layout": "zigzag", **SEVERAL},
        {"mtp_hsm": True, "perform_rl_step": True, "logits_load_dir": "a/b", "logits_save_dir": "a/b"},
        {**PACKED, "layout": "zigzag"},
        {**PACKED, "apply_rope_fusion": True},
        {**PACKED, "micro_batch_size": 2},
        {"micro_batch_size": 2, "pipeline_model_parallel_size": 2},
        {"overlap_moe_expert_parallel_comm": True},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mlp"], "cuda_graph_scope": ["mlp"]},
        {"fine_grained_activation_offloading": True, "offload_modules": ["mlp_norm"]},
        {"window_size": (128, 0), "window_attn_skip_freq": [0, 0, 0, 0]},
        {"seq_length": 4160},
        {"hierarchical_context_parallel_sizes": [1, 1, 1]},
        {"mtp_num_layers": 1, "config": {"dense_layers": (5,)}},
        {"mtp_num_layers": 1, "hybrid_layer_pattern": "M*M*/MM", "config": {"dense_layers": (5,)}},
    ],
    ids=str,
)
def test_the_remedy_or_another_run_is_accepted(flags: dict[str, Any]):
    check(**flags)


@pytest.mark.parametrize("reach", [True, False])
def test_packs_over_pipeline_stages_that_are_not_told_their_bounds(reach: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unsupported, "bounds_reach_every_stage", lambda: reach)
    check(pipeline_model_parallel_size=2)
    check(**PACKED)
    if reach:
        check(**PACKED, pipeline_model_parallel_size=2)
    else:
        with pytest.raises(ValueError, match="--pipeline-model-parallel-size must be 1 for packed documents, got 2."):
            check(**PACKED, pipeline_model_parallel_size=2)


@pytest.mark.parametrize("name", ["micro_batch_size", "eval_micro_batch_size"])
def test_packs_of_several_rows_over_pipeline_stages(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unsupported, "bounds_reach_every_stage", lambda: True)
    two_stages = {"pipeline_model_parallel_size": 2}
    check(**PACKED, **two_stages, **{name: 1})
    check(**PACKED, **two_stages, **{name: 2}, variable_seq_lengths=True)
    rule = "must be 1 for packed documents on several pipeline stages, got 2. Megatron-LM makes one pack"
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {rule}"):
        check(**PACKED, **two_stages, **{name: 2})


def test_every_row_of_the_table_is_tested():
    tested = " ".join(sentence for _, sentence in REFUSED)
    tested += " --pipeline-model-parallel-size --micro-batch-size --eval-micro-batch-size --mtraining-backend"
    assert [row.name for row in FLAGS if row.name not in tested] == []


@pytest.mark.parametrize(
    ("kinds", "warned"), [(["p2p"], False), (None, False), (["p2p", "a2a"], True), ("a2a+p2p", True)]
)
def test_another_way_to_communicate_is_said_to_be_unused(kinds: Any, warned: bool, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="megatron_mtraining"):
        check(cp_comm_type=kinds)
    assert ("is not used: --mtraining-schedule decides how keys travel." in caplog.text) == warned


def test_flags_that_nothing_reads_are_said_to_be_unused_by_the_first_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with caplog.at_level(logging.WARNING, logger="megatron_mtraining"):
        check(config={"pattern": "moba", "max_vertical": 3, "moba_top_k": 3})
        check(config={"num_probe_windows": 4, "estimator": "last_window"})
        monkeypatch.setenv("RANK", "1")
        check(config={"num_probe_windows": 4, "estimator": "last_window"})
    assert [record.getMessage() for record in caplog.records] == [
        "--mtraining-max-vertical is not used with --mtraining-pattern moba.",
        "--mtraining-num-probe-windows is not used with --mtraining-pattern vertical_slash, --mtraining-budget cost "
        "and --mtraining-estimator last_window.",
    ]


def test_the_planner_raises_where_training_does():
    """Flags that are unsupported whatever their value: a plan for such a run would be of another model."""
    absent = [row.name for row in FLAGS if row.rule == "absent"]
    assert "--window-size" in absent and len(absent) > len(OFF)
    for flag in absent:
        with pytest.raises(ValueError, match=f"got {flag} in x"):
            model_of_flags({flag: ()}, name="x")
