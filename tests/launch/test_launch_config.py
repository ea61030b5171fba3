"""Launch configs: the form of Megatron's functional tests, and the errors in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mtraining.launch_config import LaunchConfig, read_launch_config

EXAMPLE = """
TEST_TYPE: regular
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  DATA: /data
MODEL_ARGS:
  --num-layers: 4
  --lr: 1.0e-5
  --sequence-parallel: true
  --swiglu: false
  --log-params-norm:
  --data-path: ${DATA}/text_document
  --moe-layer-freq: ([0]*3+[1]*11)
  --prompts: several words
  --hierarchical-context-parallel-sizes: [4, 2]
  --recompute-modules: "[core_attn mlp]"
  --attention-backend: mtraining
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_every_kind_of_value_becomes_words(tmp_path: Path):
    run = read_launch_config(written(tmp_path, EXAMPLE))
    assert run.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "DATA": "/data"}
    assert run.flags == {
        "--num-layers": ("4",),
        "--lr": ("1e-05",),
        "--sequence-parallel": (),
        "--log-params-norm": (),
        "--data-path": ("/data/text_document",),
        "--moe-layer-freq": ("([0]*3+[1]*11)",),
        "--prompts": ("several words",),
        "--hierarchical-context-parallel-sizes": ("4", "2"),
        "--recompute-modules": ("core_attn", "mlp"),
        "--attention-backend": ("mtraining",),
    }


def test_the_command_line_wins():
    run = LaunchConfig({"--num-layers": ("4",), "--bf16": (), "--lr": ("1",)}, {})
    assert run.arguments(["--lr=2", "--num-layers", "8"]) == ["--bf16", "--lr=2", "--num-layers", "8"]
    assert run.arguments([]) == ["--num-layers", "4", "--bf16", "--lr", "1"]


def test_variables_come_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOMEWHERE", "/there")
    run = read_launch_config(written(tmp_path, "MODEL_ARGS:\n  --save: $SOMEWHERE/run\n  --load: costs $$5\n"))
    assert run.flags == {"--save": ("/there/run",), "--load": ("costs $5",)}


def test_the_environment_has_the_words_of_yaml(tmp_path: Path):
    run = read_launch_config(written(tmp_path, "ENV_VARS:\n  A: true\n  B: false\n  C:\n  D: 0.5\n  E: a b\n"))
    assert run.environment == {"A": "true", "B": "false", "C": "", "D": "0.5", "E": "a b"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ENV_VARS:\n  A=B: 1\n", "a key of ENV_VARS must be the name of a variable, got 'A=B' in"),
        ("ENV_VARS:\n  1: 1\n", "a key of ENV_VARS must be the name of a variable, got 1 in"),
        ("ENV_VARS:\n  A: [1]\n", r"A in ENV_VARS must be a number, a text, true or false, got \[1\]"),
        ('ENV_VARS:\n  A: "a\\0"\n', "A in ENV_VARS must be a number, a text, true or false, got 'a"),
        ("MODEL_ARG:\n  --lr: 1\n", "a key of the launch config must be MODEL_ARGS or ENV_VARS, got MODEL_ARG in"),
        ("MODEL_ARGS:\n  lr: 1\n", "a key of MODEL_ARGS must be a flag with its dashes, got lr in"),
        ("MODEL_ARGS: [1]\n", "MODEL_ARGS must be a mapping, got list in"),
        ("MODEL_ARGS:\n  --lr: {a: 1}\n", "--lr in MODEL_ARGS must be a number, a text, a list of them"),
        ("MODEL_ARGS:\n  --save: ${NO_SUCH_VARIABLE}\n", r"got \$\{NO_SUCH_VARIABLE\}. Export NO_SUCH_VARIABLE."),
        ("MODEL_ARGS:\n  --save: 5$\n", r"must be a text where \$ starts a variable, got 5\$. Write \$\$"),
        ("MODEL_ARGS:\n  --x: !!set {a}\n", "--x in MODEL_ARGS must be a number, a text, a list of them"),
        ("ENV_VARS:\n  A: !!binary aGk=\n", "A in ENV_VARS must be a number, a text, true or false, got b'hi'"),
        ("[" * 2000, "the YAML file must be readable, got .*run.yaml: lists or mappings nested too deeply"),
        ("MODEL_ARGS:\n\t--lr: 1\n", "the YAML file must be readable, got .*run.yaml: while scanning .* line 2"),
        ("- a\n- b\n", "the YAML file must be a mapping, got .* with list"),
        ("", "the YAML file must be a mapping, got .* with NoneType"),
        ("just text", "the YAML file must be a mapping, got .* with str"),
        ("a: [", "the YAML file must be readable, got "),
        ("MODEL_ARGS: {--exp: 2026-02-30}", "the YAML file must be readable, got .*run.yaml: day is out of range"),
        (
            "MODEL_ARGS:\n  --lr: 1\n  --lr: 2",
            r"the YAML file must be readable, got .*: --lr is there twice in .* line 2",
        ),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, text: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        read_launch_config(written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="the YAML file must be readable, got .*No such file"):
        read_launch_config(tmp_path / "none.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="the YAML file must be readable, got .*run.yaml: 'utf-8' codec"):
        read_launch_config(path)
