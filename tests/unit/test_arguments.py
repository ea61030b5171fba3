"""Each field of MTrainingConfig is a flag, with its type, default, choices and documentation."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from megatron_mtraining.arguments import add_arguments, config_from_args
from megatron_mtraining.config import MTrainingConfig

FIELDS = [field.name for field in dataclasses.fields(MTrainingConfig)]


def parser() -> argparse.ArgumentParser:
    return add_arguments(argparse.ArgumentParser())


def flag(name: str) -> str:
    return "--mtraining-" + name.replace("_", "-")


def test_no_flags_give_the_defaults():
    assert config_from_args(parser().parse_args([])) == MTrainingConfig()


def test_a_parser_takes_the_flags_once():
    twice = add_arguments(parser())
    assert config_from_args(twice.parse_args(["--mtraining-layout", "zigzag"])).layout == "zigzag"


def test_defaults_may_be_those_of_another_configuration():
    other = MTrainingConfig(layout="zigzag", dense_layers=(1, 2), num_probe_rows=128)
    parser = add_arguments(argparse.ArgumentParser(), defaults=other)
    assert config_from_args(parser.parse_args([])) == other
    assert config_from_args(parser.parse_args(["--mtraining-dense-layers", "3"])).dense_layers == (3,)


def test_every_field_survives_the_round_trip():
    config = MTrainingConfig(
        layout="rotated",
        schedule="gather",
        profile="a100",
        backend="reference",
        estimator="last_window",
        budget="top_p",
        target_recall=0.9,
        max_density=0.25,
        dense_above=0.5,
        index_sharing="kv_group",
        pattern="dense",
        moba_chunk=2048,
        moba_top_k=3,
        xattention_block=64,
        xattention_stride=8,
        xattention_threshold=0.5,
        num_probe_rows=32,
        num_probe_windows=4,
        sink_tokens=1,
        local_blocks=3,
        vertical_top_p=0.25,
        slash_top_p=1.0,
        max_vertical=3,
        max_slash=5,
        slash_run_length=2,
        dense_below=0,
        dense_layers=(1, 12),
        dense_warmup_steps=7,
        block_size=16,
    )
    words: list[str] = []
    for name in FIELDS:
        value = getattr(config, name)
        assert value != getattr(MTrainingConfig(), name), f"{name} is not tested by its default"
        words += [flag(name), *map(str, value if isinstance(value, tuple) else [value])]
    assert config_from_args(parser().parse_args(words)) == config


def test_every_flag_is_documented_from_the_field():
    text = " ".join(parser().format_help().split())
    assert all(flag(name) in text for name in FIELDS)
    assert "vertical_slash: leading tokens of each document that every head selects as verticals." in text
    assert "contiguous, zigzag, striped, rotated or node_striped" in text


@pytest.mark.parametrize("words", [["--mtraining-layout", "spiral"], ["--mtraining-num-probe-rows", "many"]])
def test_argparse_refuses_what_no_field_takes(words: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        parser().parse_args(words)
    assert words[0] in capsys.readouterr().err


def test_the_config_refuses_what_is_out_of_range():
    args = parser().parse_args(["--mtraining-slash-top-p", "1.5"])
    with pytest.raises(ValueError, match=r"slash_top_p must be in \(0, 1\], got 1.5"):
        config_from_args(args)
