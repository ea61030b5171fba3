"""A configuration from a YAML file, and from the file that the environment names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.config_file import CONFIG_VARIABLE, config_from_environment, read_config


def written(folder: Path, text: str) -> Path:
    path = folder / "mtraining.yaml"
    path.write_text(text)
    return path


def test_keys_are_fields(tmp_path: Path):
    path = written(tmp_path, "layout: zigzag\nvertical_top_p: 0.25\ndense_layers: [1, 2]\nmoba_top_k: 3\n")
    expected = MTrainingConfig(layout="zigzag", vertical_top_p=0.25, dense_layers=(1, 2), moba_top_k=3)
    assert read_config(path) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layuot: zigzag", "a key of the YAML file must be one of layout, .* got layuot in"),
        ("num_probe_rows: 0", "^num_probe_rows must"),
        (
            "lost_rank_timeout_s: 60",
            "^lost_rank_timeout_s must be left out of the configuration, got 60 in .*within the group's timeout",
        ),
    ],
)
def test_other_keys_and_values_are_refused(tmp_path: Path, text: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        read_config(written(tmp_path, text))


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    assert config_from_environment() == MTrainingConfig()
    monkeypatch.setenv(CONFIG_VARIABLE, str(written(tmp_path, "num_probe_rows: 128")))
    assert config_from_environment().num_probe_rows == 128


def test_without_a_yaml_reader_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ValueError, match="PyYAML must be installed to read YAML, got none. Run pip install"):
        read_config(written(tmp_path, "num_probe_rows: 128"))
