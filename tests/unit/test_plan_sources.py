"""Models and plans from launch configs, Hugging Face configurations, flags and files of measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_mtraining.planner.attention_clock import load_of_density
from megatron_mtraining.planner.model import PRESETS, model_of, model_of_flags
from megatron_mtraining.planner.plan import Plan
from megatron_mtraining.planner.report import model_flags, plan_flags
from tools import plan_check
from tools.plan_of_flags import flags_of, plan_of_flags

ROOT = Path(__file__).parents[2]
MEASURED = sorted((ROOT / "docs/benchmarks/pretrain_gpt").glob("[0-9]*.json"))

QWEN_CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_one_model_from_two_sources(tmp_path):
    pytest.importorskip("yaml")
    published = tmp_path / "config.json"
    published.write_text(json.dumps(QWEN_CONFIG))
    preset = PRESETS["qwen2.5-3b"]
    for source in (published, ROOT / "examples/qwen2.5-3b-512k/run.yaml"):
        assert replace(model_of(str(source)), name=preset.name) == preset


NO_WINDOW = "without a sliding window"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_local_experts": 8}, "a model of dense layers and plain attention, got num_local_experts 8"),
        ({"moe_intermediate_size": 64}, "a model of dense layers and plain attention, got moe_intermediate_size 64"),
        ({"kv_lora_rank": 512}, "a model of dense layers and plain attention, got kv_lora_rank 512"),
        ({"model_type": "llama", "attention_bias": True}, "plain attention, got attention_bias True"),
        ({"model_type": "gpt_neox"}, "--model must be of model_type llama, mistral, qwen2, qwen3, got 'gpt_neox' in"),
        ({"hidden_size": None}, "--model must be a file with hidden_size, got"),
        ({"num_attention_heads": 12}, "--model must be a file with head_dim, or .*, got 12 heads of 2048"),
        ({"num_key_value_heads": 3}, "num_heads of the model must be a multiple of its 3 kv heads, got 16"),
        ({"vocab_size": 0}, "vocab_size of the model must be from 1 to 1073741824, got 0"),
        ({"hidden_size": 10**400}, r"hidden_size of the model must be from 1 to 1073741824, got 10000"),
        ({"sliding_window": 4096}, NO_WINDOW),
        ({"sliding_window": 512, "model_type": "llama"}, NO_WINDOW),
        ({"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False}, NO_WINDOW),
        ({"layer_types": ["full_attention", "sliding_attention"]}, NO_WINDOW),
    ],
)
def test_unsupported_models(tmp_path, changed, sentence):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_CONFIG | changed))
    with pytest.raises(ValueError, match=sentence):
        model_of(str(path))


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["full_attention"] * 36},
        {"model_type": "mistral", "sliding_window": None},
    ],
)
def test_windows_that_no_layer_has_are_accepted(tmp_path, changed):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_CONFIG | changed))
    assert model_of(str(path)).num_layers == 36


@pytest.mark.parametrize(
    ("flag", "values", "sentence"),
    [
        ("--num-experts", ("8",), "a model of dense layers and plain attention, got --num-experts in x"),
        ("--num-layers", ("many",), "--num-layers must be a whole number, got many"),
        ("--num-layers", ("4",), "--model must be a file with --hidden-size, got x"),
    ],
)
def test_unsupported_launch_configs(flag, values, sentence):
    with pytest.raises(ValueError, match=sentence):
        model_of_flags({flag: values}, name="x")


@pytest.mark.parametrize(
    "changed",
    [
        {"recompute": "full", "offload": True},
        {"recompute": "selective", "schedule": "gather", "index_sharing": "kv_group"},
        {"tp": 1, "dp": 4, "schedule": "flat", "layout": "rotated"},
        {"attention": "transformer_engine", "layout": "zigzag", "schedule": "flat", "pack_width": 0},
    ],
)
def test_flags_are_the_plan(changed):
    """The printed flags, read again, are the same plan and the same model."""
    given = {"seq_len": 131072, "tp": 2, "cp": 4, "pp": 2, "dp": 2, "global_batch": 32, "pack_width": 1152}
    plan, model = Plan(**given | changed), PRESETS["qwen3-8b"]
    flags = flags_of(plan_flags(plan, load_of_density(131072, 0.05)))
    assert plan_of_flags(flags, gpus=plan.gpus) == plan
    sizes = {"--vocab-size": (str(model.vocab_size - 1),)}
    assert model_of_flags(flags_of(model_flags(model)) | sizes, name=model.name) == model


def test_flags_that_are_not_predicted():
    for flags, sentence in (
        ({"--micro-batch-size": ("2",)}, "--micro-batch-size must be 1, got 2"),
        ({"--mtraining-pattern": ("moba",)}, "--mtraining-pattern must be vertical_slash, .*, got moba"),
        ({"--cross-entropy-loss-fusion": ()}, "unsupported: --cross-entropy-loss-fusion"),
        ({"--recompute-granularity": ("selective",)}, "--recompute-modules must be mlp, got core_attn"),
        (
            {"--recompute-granularity": ("full",), "--recompute-num-layers": ("2",)},
            "--recompute-num-layers must be 1, got 2",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            plan_of_flags(flags | {"--use-distributed-optimizer": ()})
    with pytest.raises(ValueError, match="unsupported: gradients without --use-distributed-optimizer"):
        plan_of_flags({"--context-parallel-size": ("4",)})
    with pytest.raises(ValueError, match="a command line must be of flags and their values, got '4'"):
        flags_of(["4", "--num-layers"])
    with pytest.raises(ValueError, match="gpus must be a multiple of tp 1 x cp 4 x pp 1, got 6"):
        plan_of_flags({"--context-parallel-size": ("4",)}, gpus=6)


def test_predictions_of_measured_runs(capsys):
    """Every file of runs, within the bounds."""
    assert MEASURED
    assert plan_check.main([str(path) for path in MEASURED]) == 0
    assert "largest error in time" in capsys.readouterr().out


@pytest.mark.parametrize(("changed", "status"), [({"iteration_ms": 1246.3}, 1), ({"max_allocated_mib": 30000}, 1)])
def test_a_wrong_prediction_is_reported(tmp_path, capsys, changed, status):
    (run, *_) = json.loads(MEASURED[0].read_text())
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([run | changed]))
    assert plan_check.main([str(path)]) == status
    path.write_text("{}")
    with pytest.raises(SystemExit):
        plan_check.main([str(path)])
    assert "a file of runs must be a list of mappings" in capsys.readouterr().err
