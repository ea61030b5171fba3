"""The settings, the YaRN entry and the launch config of examples/extend_context, on every machine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.extend_context import sample_losses
from examples.extend_context.__main__ import COMMANDS, main
from examples.extend_context.held_out import mtraining_words, summarise
from examples.extend_context.launch_config import launch_config
from examples.extend_context.model_folder import extended_config, model_flags, read_model_config, write_model_folder
from examples.extend_context.prepare_model import prepare_folder
from examples.extend_context.settings import ModelSettings, read_settings
from examples.extend_context.train import command, run_script, write_launch_config
from tests.programs import run_program

EXAMPLE = Path(__file__).parents[2] / "examples/extend_context/smollm2/cpu.yaml"

QWEN2 = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 500,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32,
}  # fmt: skip
LLAMA = {
    **{name: value for name, value in QWEN2.items() if "sliding" not in name and name != "rope_theta"},
    "model_type": "llama", "tie_word_embeddings": False, "head_dim": 24, "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip

MODEL = ModelSettings(source="none", length=2048)


def write_source(folder: Path, config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 256, "eos_token": "e"}')
    (folder / "pytorch_model.bin").write_bytes(b"not taken")
    return folder


def settings_of(tmp_path: Path, *changes: str):
    return read_settings(EXAMPLE, (f"output={tmp_path / 'out'}", *changes))


@pytest.mark.parametrize("config", [QWEN2, LLAMA], ids=lambda config: config["model_type"])
def test_the_yarn_entry_is_whole(config):
    extended = extended_config(config, MODEL)
    theta = 1000000.0 if config is QWEN2 else 5000.0
    assert extended["rope_scaling"] == {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": True, "rope_theta": theta,
    }  # fmt: skip
    assert (extended["max_position_embeddings"], extended["rope_theta"]) == (2048, theta)
    assert "rope_parameters" not in extended
    assert extended["vocab_size"] == 500


@pytest.mark.parametrize(
    ("rope", "length", "message"),
    [
        ({"rope_type": "yarn", "attention_factor": 1.0}, 2048, "got attention_factor. Megatron-Bridge would drop it"),
        ({"rope_type": "yarn", "factor": 4.0}, 2048, "rope_type in config.json must be default, .* got 'yarn'"),
        ({"type": "llama3"}, 2048, "rope_type in config.json must be default, .* got 'llama3'"),
        ({}, 256, "model.length must be above the model's own 256 tokens, got 256"),
    ],
)
def test_what_is_no_model_to_extend_raises(rope, length, message):
    with pytest.raises(ValueError, match=message):
        extended_config(QWEN2 | {"rope_scaling": rope}, ModelSettings(source="none", length=length))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type in config.json must be one of llama, qwen2, qwen3, got 'gpt2'"),
        ({"use_sliding_window": True}, "use_sliding_window in config.json must be false"),
        ({"attention_bias": True}, "attention_bias in config.json must be false"),
        ({"quantization_config": {}}, "the model must be of unquantised weights"),
    ],
)
def test_a_model_that_is_not_converted_raises(tmp_path, change, message):
    folder = write_source(tmp_path / "model", QWEN2 | change)
    with pytest.raises(ValueError, match=message):
        read_model_config(folder)


def test_a_folder_that_is_no_model_raises(tmp_path, capsys):
    with pytest.raises(ValueError, match="model.source must be a Hugging Face model's folder, got .* without config"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match="config.json must be readable JSON"):
        read_model_config(tmp_path)
    status = main(["prepare_model", "--config", str(EXAMPLE), f"output={tmp_path}", f"model.source={tmp_path}/none"])
    assert status == 2
    assert "prepare_model: model.source must be a Hugging Face folder, a .gguf file or" in capsys.readouterr().err


def test_the_folder_has_linked_weights_and_the_new_length(tmp_path):
    source = write_source(tmp_path / "source", LLAMA)
    target = tmp_path / "out/model"
    write_model_folder(source, target, extended_config(LLAMA, MODEL))
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer_config.json",
    ]  # fmt: skip
    assert (target / "model.safetensors").samefile(source / "model.safetensors")
    assert json.loads((target / "tokenizer_config.json").read_text()) == {"model_max_length": 2048, "eos_token": "e"}
    assert json.loads((source / "config.json").read_text()) == LLAMA


def test_weights_must_be_safetensors(tmp_path):
    source = write_source(tmp_path / "source", LLAMA)
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.source must be of weights as safetensors"):
        write_model_folder(source, tmp_path / "out", LLAMA)


def test_a_prepared_folder_is_kept_and_another_length_makes_it_anew(tmp_path):
    source = write_source(tmp_path / "source", LLAMA)
    changes = (f"model.source={source}", "model.length=2048")
    prepare_folder(settings_of(tmp_path, *changes))
    marker = tmp_path / "out/model/marker"
    marker.touch()
    prepare_folder(settings_of(tmp_path, *changes))
    assert marker.exists()
    (tmp_path / "out/model_megatron").mkdir()
    prepare_folder(settings_of(tmp_path, changes[0], "model.length=4096"))
    assert not marker.exists()
    assert not (tmp_path / "out/model_megatron").exists(), "a checkpoint of the other length"


def test_model_flags():
    flags = model_flags(extended_config(QWEN2, MODEL))
    expected = {
        "--kv-channels": 16, "--num-query-groups": 2, "--add-qkv-bias": True, "--qk-layernorm": False,
        "--untie-embeddings-and-output-weights": False, "--rotary-base": 1000000, "--rotary-scaling-factor": 8.0,
        "--yarn-original-max-position-embeddings": 256, "--mscale": 1.0, "--mscale-all-dim": 0.0,
        "--yarn-correction-range-round-to-int": True, "--max-position-embeddings": 2048,
    }  # fmt: skip
    assert {name: flags[name] for name in expected} == expected
    flags = model_flags(extended_config(LLAMA, ModelSettings(source="none", length=512, truncate=False)))
    assert (flags["--kv-channels"], flags["--add-qkv-bias"], flags["--rotary-base"]) == (24, False, 5000)
    assert flags["--untie-embeddings-and-output-weights"] is True
    assert flags["--no-yarn-correction-range-round-to-int"] is True
    assert model_flags(extended_config(QWEN2 | {"model_type": "qwen3"}, MODEL))["--qk-layernorm"] is True


@pytest.fixture
def prepared(tmp_path):
    """Settings whose model and data are prepared, as far as a launch config reads them."""
    settings = settings_of(
        tmp_path, "train.seq_length=128", "train.flags={--lr: 0.5, --bf16: true}", "model.length=2048"
    )
    write_model_folder(write_source(tmp_path / "source", QWEN2), settings.model_folder, extended_config(QWEN2, MODEL))
    settings.data_folder.mkdir()
    part = {"documents": 2, "tokens": 10}
    none = {"documents": 0, "tokens": 0}
    sources = [
        {"name": "a", "weight": 0.25, "train": part, "held_out": part},
        {"name": "b", "weight": None, "train": none, "held_out": part},
    ]
    (settings.data_folder / "report.json").write_text(json.dumps({"sources": sources}))
    return settings


def test_launch_config(prepared):
    config = launch_config(prepared, has_gpu=False, has_transformer_engine=False)
    flags, data = config["MODEL_ARGS"], prepared.data_folder.resolve()
    assert flags["--train-data-path"] == ["0.25", str(data / "a_train")]
    assert flags["--valid-data-path"] == ["10", str(data / "a_held_out"), "10", str(data / "b_held_out")]
    assert (flags["--lr"], flags["--bf16"]) == (0.5, True), "flags of the settings win"
    assert (flags["--padded-vocab-size"], flags["--seq-length"]) == (500, 128)
    assert flags["--attention-backend"] == "mtraining"
    assert flags["--distributed-backend"] == "gloo"
    assert (flags["--load"], flags["--finetune"]) == (str(prepared.megatron_folder.resolve()), True)
    gpu = launch_config(prepared, has_gpu=True, has_transformer_engine=True)["MODEL_ARGS"]
    assert "--distributed-backend" not in gpu
    assert gpu["--transformer-impl"] == "transformer_engine"


@pytest.mark.parametrize(
    ("has_gpu", "has_transformer_engine", "ranks", "pattern"),
    [(False, False, 1, None), (False, False, 2, "dense"), (True, False, 1, "dense"), (True, True, 2, None)],
)
def test_dense_attention_where_megatron_has_none(prepared, has_gpu, has_transformer_engine, ranks, pattern):
    train = dataclasses.replace(prepared.train, attention="dense", ranks=ranks)
    settings = dataclasses.replace(prepared, train=train)
    config = launch_config(settings, has_gpu=has_gpu, has_transformer_engine=has_transformer_engine)
    flags = config["MODEL_ARGS"]
    assert flags.get("--mtraining-pattern") == pattern
    assert (flags.get("--attention-backend") == "mtraining") == (pattern is not None)


def test_a_run_with_a_checkpoint_continues(prepared):
    checkpoints = prepared.run_folder / "checkpoints"
    (checkpoints / "iter_0000005").mkdir(parents=True)
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    for number in ("", "5"):  # empty: of a full disk
        tracker.write_text(number)
        flags = launch_config(prepared, has_gpu=False, has_transformer_engine=False)["MODEL_ARGS"]
        assert flags["--load"] == str((checkpoints if number else prepared.megatron_folder).resolve())
        assert ("--finetune" in flags) == (not number)


def test_the_launcher_reads_the_launch_config(prepared, tmp_path):
    script, path = tmp_path / "pretrain_gpt.py", tmp_path / "launch.yaml"
    script.write_text("import sys; print(*sys.argv[1:])")
    write_launch_config(path, launch_config(prepared, has_gpu=False, has_transformer_engine=False))
    line = command(prepared, script, path, has_gpu=False)
    assert line[:3] == [sys.executable, "-m", "torch.distributed.run"]
    arguments = line[line.index("megatron_mtraining") - 1 :]
    ended = run_program(*arguments)
    assert ended.status == 0, ended.stderr
    words = ended.stdout.split()
    assert words[words.index("--num-layers") + 1] == "2"
    assert words[words.index("--train-data-path") + 1] == "0.25"
    assert "--qk-layernorm" not in words


def test_nothing_prepared_raises(tmp_path):
    with pytest.raises(ValueError, match="the model must be prepared, got no .* Run prepare_model first"):
        launch_config(settings_of(tmp_path), has_gpu=False, has_transformer_engine=False)


def test_a_failed_run_reports_its_last_lines(prepared, tmp_path):
    script, path = tmp_path / "pretrain_gpt.py", tmp_path / "launch.yaml"
    script.write_text("raise SystemExit('planted end')")
    path.write_text("MODEL_ARGS: {}")
    with pytest.raises(ValueError, match=r"(?s)the training run must be successful.*status 1"):
        run_script(prepared, script, path, has_gpu=True)
    assert "planted end" in (tmp_path / "log.txt").read_text()


def test_train_needs_a_tree(prepared, capsys):
    assert main(["train", "--config", str(EXAMPLE), "train.megatron_lm=nowhere"]) == 2
    assert "train.megatron_lm must be the folder of a Megatron-LM tree, got no nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.attention=sliding", "train.attention must be one of mtraining, dense, got 'sliding'"),
        ("train.seq_length=100000", "train.seq_length must be at most model.length = 65536, got 100000"),
        ("train.steps=many", "train.steps must be of type int, got 'many'"),
        ("train.steps=true", "train.steps must be of type int, got True"),
        ("train.stepz=1", "a key of train must be one of megatron_lm, .*, got stepz"),
        ("train.steps", "a change must be KEY.KEY=VALUE, got train.steps"),
        ("data.held_out_share=1", r"data.held_out_share must be in \[0, 1\), got 1"),
        ("data.sources=[]", r"data.sources must be a list that is not empty, got \[\]"),
        ("data.sources=[{name: a/b, path: x}]", "name of a source must be of letters"),
        ("data.sources=[{name: a, path: x}, {name: a, path: y}]", "name of a source must be another for each source"),
        ("data.sources=[{name: a, path: x, form: xml}]", "form of a must be one of text, jsonl, parquet, prolong"),
        ("data.sources=[{name: a, path: x, weight: 0}]", "weight of a must be above 0"),
        (
            "data.sources=[{name: a, path: x, weight: 1}, {name: b, path: y}]",
            "weight of a source must be given for all",
        ),
        ("data.sources=[{name: a, path: x, held_out: true}]", "of one source at least that is not held out, got a"),
        ("data.sources=[{name: a}]", r"data.sources\[0\].path must be given, got nothing"),
        ("model=none", "model must be a mapping, got 'none'"),
    ],
)
def test_bad_settings_raise(change, message):
    with pytest.raises(ValueError, match=message):
        read_settings(EXAMPLE, (change,))


def test_settings_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="--config must be a readable YAML file, got .*missing"):
        read_settings(tmp_path / "missing")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ValueError, match="--config must be a mapping, got .* with list"):
        read_settings(tmp_path / "list.yaml")


def test_changes_win(tmp_path):
    settings = settings_of(tmp_path, "train.learning_rate=2e-5", "train.run=second", "model.beta_fast=16")
    assert settings.train.learning_rate == 2e-5
    assert settings.model.beta_fast == 16.0
    assert settings.run_folder == tmp_path / "out/runs/second"
    assert settings.data.sources[1].held_out


def test_words_of_this_package():
    flags = {"--lr": 1, "--mtraining-local-blocks": 1, "--mtraining-dense-layers": [1, 2], "--mtraining-x": False}
    words = ["--mtraining-local-blocks", "1", "--mtraining-dense-layers", "1", "2"]
    assert mtraining_words(flags) == words


def test_losses_by_position():
    import numpy

    losses = numpy.arange(2 * 16, dtype=float).reshape(2, 16)
    found = summarise(losses)
    assert (found.mean, found.documents, found.tokens) == (15.5, 2, 16)
    assert found.by_position[0] == (0, 2, 8.5)
    assert found.by_position[-1] == (14, 16, 22.5)


def test_the_run_of_qwen_continues_from_what_the_chain_prepares():
    """Both files say the same YaRN entry, length and steps."""
    import yaml

    folder = EXAMPLE.parents[2]
    settings = read_settings(folder / "extend_context/qwen2.5-3b/extend.yaml")
    flags = yaml.safe_load((folder / "qwen2.5-3b-512k/run.yaml").read_text())["MODEL_ARGS"]
    prepared = model_flags(extended_config({**QWEN2, "max_position_embeddings": 32768}, settings.model))
    yarn = [name for name in prepared if "yarn" in name or "scal" in name or name == "--position-embedding-type"]
    assert len(yarn) >= 6
    assert {name: prepared[name] for name in yarn if name in flags} == {
        name: flags[name] for name in yarn if name in flags
    }
    assert (settings.train.seq_length, settings.train.steps) == (flags["--seq-length"], flags["--train-iters"])
    assert flags["--global-batch-size"] * flags["--seq-length"] * flags["--train-iters"] > 1e9, "the paper's tokens"


def test_make_extend_reports_set_up_and_chain_apart(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$3 $PYTHONPATH"\n')
    python.chmod(0o755)
    (tmp_path / "weights.gguf").touch()
    own = {"VENV": "0", "PYTHON": str(python), "MEGATRON_LM": "tree", "SMOLLM2": str(tmp_path / "weights.gguf")}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    done = subprocess.run([EXAMPLE.with_name("run.sh")], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    root = EXAMPLE.parents[3]
    assert lines[2::2] == [f"{name} {root}" for name in COMMANDS[:4]]
    assert all(line.startswith("== ") for line in lines[1:-1:2])
    assert re.fullmatch(r"PASSED in 0 min \d+ s after a set-up of 0 min \d+ s", lines[-1])


def test_losses_of_samples_are_dense_or_of_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        sample_losses.main(["model", "checkpoint", "--prepared", "samples", "--dense", "--mtraining-budget", "fixed"])
    assert ended.value.code == 2
    assert "unsupported: --dense with --mtraining-... flags" in capsys.readouterr().err
