"""Models and plans from run files, Hugging Face configurations, flags and files of measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_mtraining.planner import PRESETS, Plan, load_of_density, model_of, model_of_flags
from megatron_mtraining.planner.report import model_flags, plan_flags
from tools import plan_check
from tools.plan_of_flags import flags_of_words, plan_of_flags

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


def test_one_model_from_three_sources(tmp_path):
    pytest.importorskip("yaml")
    published = tmp_path / "config.json"
    published.write_text(json.dumps(QWEN_CONFIG))
    run_file = ROOT / "examples/qwen2.5-3b-512k/run.yaml"
    preset = PRESETS["qwen2.5-3b"]
    for source in (published, run_file):
        assert replace(model_of(str(source), {}), name=preset.name) == preset
    assert model_of("qwen2.5-3b", {"num_layers": 4}) == replace(preset, num_layers=4)
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_heads": 4, "num_kv_heads": 2}
    assert model_of(None, {**sizes, "head_dim": 16, "vocab_size": 100}).num_heads == 4


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_local_experts": 8}, "--model must be a model of dense layers, got num_local_experts 8"),
        ({"moe_intermediate_size": 64}, "--model must be a model of dense layers, got moe_intermediate_size 64"),
        ({"kv_lora_rank": 512}, "--model must be a model of plain attention, got kv_lora_rank 512"),
        ({"mlp_bias": True}, "--model must be a model without such biases, got mlp_bias True"),
        (
            {"model_type": "llama", "attention_bias": True},
            "--model must be a model without such biases, got attention_bias True",
        ),
        (
            {"model_type": "gpt_neox"},
            "--model must be of model_type llama, mistral, qwen2, qwen3, got 'gpt_neox' in .*Give sizes by flags",
        ),
        ({"model_type": None}, "--model must be of model_type .*, got None"),
        ({"hidden_size": None}, "--model must be a file with hidden_size, got"),
        ({"num_attention_heads": 12}, "--model must be a file with head_dim, or .*, got 12 heads of 2048"),
        ({"num_key_value_heads": 3}, "num_heads of the model must be a multiple of its 3 kv heads, got 16"),
        ({"vocab_size": 0}, "vocab_size of the model must be at least 1, got 0"),
        ({"hidden_size": 10**30}, r"hidden_size of the model must be at most 1073741824, got 1\.000e\+30"),
        ({"attention_dropout": 0.1}, "--model must be a model of plain attention, got attention_dropout 0.1"),
        ({"sliding_window": 4096}, "--model must be a model without a sliding window, got sliding_window 4096"),
        ({"sliding_window": 512, "model_type": "llama"}, "without a sliding window, got sliding_window 512"),
        ({"use_sliding_window": True}, "without a sliding window, got sliding_window 4096"),
        ({"use_sliding_window": True, "model_type": "qwen3", "max_window_layers": 35}, "without a sliding window"),
        ({"model_type": "mistral"}, "without a sliding window, got sliding_window 4096 .* Training refuses it too"),
        ({"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False}, "without a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "got layer_types with sliding_attention"),
    ],
)
def test_models_that_are_not_planned(tmp_path, changed, sentence):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_CONFIG | changed))
    with pytest.raises(ValueError, match=sentence):
        model_of(str(path), {})


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 36},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 36},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "llama", "sliding_window": 4096, "use_sliding_window": False},
    ],
)
def test_windows_that_no_layer_has_are_no_hindrance(tmp_path, changed):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_CONFIG | changed))
    assert model_of(str(path), {}).num_layers == 36


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "--model must be a readable config.json, got .*config.json: Expecting"),
        ("[]", "--model must be a config.json with a mapping, got .*config.json with list"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, sentence):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        model_of(str(path), {})


@pytest.mark.parametrize(
    ("flag", "words", "sentence"),
    [
        ("--num-experts", ("8",), "a model of dense layers and plain attention, got --num-experts in x"),
        ("--window-size", ("127", "0"), "a model of dense layers and plain attention, got --window-size in x"),
        ("--mtp-num-layers", ("1",), "a model of dense layers and plain attention, got --mtp-num-layers in x"),
        ("--attention-dropout", ("0.1",), "--attention-dropout must be 0, got 0.1 in x"),
        ("--attention-dropout", (), "--attention-dropout must be 0, got nothing in x"),
        ("--softmax-type", ("learnable",), "--softmax-type must be vanilla, got learnable in x"),
        ("--position-embedding-type", ("mrope",), "--position-embedding-type must be rope, .*, got mrope in x"),
        ("--mtraining-pattern", ("moba",), "--mtraining-pattern must be vertical_slash, .*, got moba in x"),
    ],
)
def test_run_files_that_are_not_planned(flag, words, sentence):
    with pytest.raises(ValueError, match=sentence):
        model_of_flags({flag: words}, name="x")


@pytest.mark.parametrize(
    "changed",
    [
        {"recompute": "full", "offload": True},
        {"recompute": "selective", "schedule": "gather"},
        {"tp": 1, "dp": 4, "schedule": "flat", "layout": "rotated"},
        {"index_sharing": "kv_group", "loss_fusion": True},
        {"attention": "transformer_engine", "layout": "zigzag", "schedule": "flat", "pack_width": 0},
    ],
)
def test_flags_say_the_plan(changed):
    """What is printed, read again, is the same plan and the same model."""
    given = {"seq_len": 131072, "tp": 2, "cp": 4, "pp": 2, "dp": 2, "global_batch": 32, "pack_width": 1152}
    plan, model = Plan(**given | changed), PRESETS["qwen3-8b"]
    load = load_of_density(131072, 0.05)
    flags = flags_of_words([word for flag in plan_flags(plan, load) for word in flag])
    assert plan_of_flags(flags, gpus=plan.gpus) == plan
    sizes = {"--vocab-size": (str(model.vocab_size - 1),)}
    words = [word for flag in model_flags(model) for word in flag]
    assert model_of_flags(flags_of_words(words) | sizes, name=model.name) == model


def test_flags_that_are_not_predicted():
    for flags, sentence in (
        ({"--micro-batch-size": ("2",)}, "--micro-batch-size must be 1, got 2"),
        ({"--mtraining-pattern": ("moba",)}, "--mtraining-pattern must be vertical_slash, .*, got moba"),
        ({"--recompute-granularity": ("selective",)}, "--recompute-modules must be mlp, got core_attn"),
        (
            {"--recompute-granularity": ("full",), "--recompute-num-layers": ("2",)},
            "--recompute-num-layers must be 1, got 2",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            plan_of_flags(flags)
    with pytest.raises(ValueError, match="a command line must be of flags and their values, got '4'"):
        flags_of_words(["4", "--num-layers"])
    with pytest.raises(ValueError, match="gpus must be a multiple of tp 1 x cp 4 x pp 1, got 6"):
        plan_of_flags({"--context-parallel-size": ("4",)}, gpus=6)


def test_predictions_of_measured_runs(capsys):
    """Every file of runs, within the bounds."""
    assert MEASURED
    assert plan_check.main([str(path) for path in MEASURED]) == 0
    assert "largest error in time" in capsys.readouterr().out


def test_a_wrong_prediction_is_told(tmp_path, capsys):
    runs = json.loads(MEASURED[0].read_text())
    path = tmp_path / "runs.json"
    runs[0]["iteration_ms"] *= 1.4
    path.write_text(json.dumps(runs))
    assert plan_check.main([str(path)]) == 1
    runs[0]["iteration_ms"] /= 1.4
    runs[0]["max_allocated_mib"] = 30000
    path.write_text(json.dumps(runs))
    assert plan_check.main([str(path)]) == 1
    assert "largest error in memory 12" in capsys.readouterr().out
    path.write_text("{}")
    with pytest.raises(SystemExit):
        plan_check.main([str(path)])
    assert "a file of runs must be a list of mappings" in capsys.readouterr().err
