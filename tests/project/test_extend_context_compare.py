"""Comparison of attentions on a real model: flags, results of logs, and the table; no run is trained here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.extend_context import compare as subject
from examples.extend_context.documents import path_of, read_documents
from examples.extend_context.settings import SYSTEMS, Settings, Source, read_settings
from megatron_mtraining import MTrainingConfig

FOLDER = Path(__file__).parents[2] / "examples/extend_context/smollm2"

LOG = """
 [2026-12-01] iteration        1/       2 | elapsed time per iteration (ms): 900.0 | lm loss: 3.000000E+00 |
 mtraining iteration        1 | executed throughput per GPU (TFLOP/s/GPU): 0.1 | density (%): 20.00 (5.00 to 50.20) |
 [2026-12-01] iteration        2/       2 | elapsed time per iteration (ms): 800.0 | lm loss: 9.000000E+00 |
 [2026-12-01] iteration        2/       2 | elapsed time per iteration (ms): 500.0 | lm loss: 2.000000E+00 |
 mtraining iteration        2 | executed throughput per GPU (TFLOP/s/GPU): 0.1 | density (%): 10.00 (5.00 to 50.20) |
"""

CONFIGS = {
    "algorithm_1": MTrainingConfig.algorithm_1(),
    "moba": MTrainingConfig(pattern="moba", moba_chunk=512),  # 12 chunks of 4096 in 524288 tokens
    "xattention": MTrainingConfig(pattern="xattention"),
    "zigzag": MTrainingConfig(layout="zigzag"),
    "flat": MTrainingConfig(schedule="flat"),
}


@pytest.fixture
def settings(tmp_path) -> Settings:
    return read_settings(FOLDER / "h200.yaml", (f"output={tmp_path}",))


def test_a_repeated_step_counts_once():
    steps, densities = subject.read_log(LOG)
    assert steps == {1: (900.0, 3.0), 2: (500.0, 2.0)}
    assert densities == [0.2, 0.1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_flags_make_the_system(settings, system):
    from examples.extend_context.held_out import mtraining_words
    from megatron_mtraining.megatron import add_arguments, config_from_args

    run = subject.run_settings(settings, system, 7)
    assert (run.train.seed, run.train.attention) == (7, "dense" if system == "dense" else "mtraining")
    assert run.run_folder == Path(settings.output, "runs/compare", f"{system}_7")
    import argparse

    words = mtraining_words(run.train.flags)
    config = config_from_args(add_arguments(argparse.ArgumentParser()).parse_args(words))
    assert config == CONFIGS.get(system, MTrainingConfig())


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_exported_folder_knows_the_attention_it_was_trained_with(settings, system, tmp_path):
    from examples.extend_context.export import save_attention
    from examples.extend_context.launch_config import attention_flags
    from examples.extend_context.train import write_launch_config

    run = subject.run_settings(settings, system, 7)
    flags = attention_flags(run, has_gpu=True, has_transformer_engine=False) | run.train.flags
    write_launch_config(tmp_path / "launch.yaml", {"MODEL_ARGS": flags})
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    save_attention(tmp_path / "launch.yaml", tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.pop("vocab_size") == 7
    assert MTrainingConfig(**saved["mtraining"]) == CONFIGS.get(system, MTrainingConfig())


def result(system: str, seed: int, losses: list[float], held_out: float, **changes: object) -> dict:
    return {
        "system": system,
        "seed": seed,
        "seq_length": 64,
        "model": "m",
        "data": {"a": [100, 0]},
        "flags": {},
        "losses": losses,
        "step_ms": 100.0 * seed,
        "density": 0.1 * seed,
        "held_out": {"before": {"mean": 3.0}, "after": {"mean": held_out}},
        "device": "CPU",
        "ranks": 1,
    } | changes


def test_the_table_is_of_differences_of_equal_seeds():
    results = [
        result("dense", 1, [9.0] + [2.0] * 20, 2.0),
        result("dense", 2, [9.0] + [4.0] * 20, 4.0),
        result("mtraining", 1, [9.0] + [2.2] * 20, 2.1),
        result("mtraining", 2, [9.0] + [4.0] * 20, 4.4),
        result("moba", 3, [1.0] * 20, 1.0),
    ]
    dense, ours, moba = (line.strip("| ").split(" | ") for line in subject.table(results).splitlines()[2:])
    assert dense == ["dense", "1, 2", "100 %", "150", "3.0000 (2.0000 to 4.0000)", "", "3.0000 (2.0000 to 4.0000)"]
    assert ours[2:4] == ["15.0%", "150"]
    assert ours[5] == "+5.00 % (+0.00 to +10.00)"
    assert ours[7] == "+7.50 % (+5.00 to +10.00)"
    assert moba == ["MoBA", "3", "30.0%", "300", "1.0000", "", "1.0000"], "no dense run of this seed"


def test_results_of_other_data_are_not_compared():
    with pytest.raises(ValueError, match=r"results must be all of .*mtraining_1.json"):
        subject.check_alike([result("dense", 1, [1.0], 1.0), result("mtraining", 1, [1.0], 1.0, data={"a": [99, 0]})])


def test_finished_runs_are_not_trained_again(settings, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "compare"
    folder.mkdir()
    for system in ("dense", "mtraining"):
        (folder / f"{system}_1.json").write_text(json.dumps(result(system, 1, [3.0, 2.0], 2.0)))
    monkeypatch.setattr(subject, "train", lambda _: pytest.fail("trained"))
    changed = read_settings(FOLDER / "h200.yaml", (f"output={tmp_path}", "compare={systems: [dense], seeds: [1]}"))
    assert subject.compare(changed).startswith("2 runs in ")
    assert "| this package | 1 |" in capsys.readouterr().out
    assert (folder / "table.md").read_text().count("\n") == 4


def test_sources_of_installed_packages(tmp_path):
    import packaging

    source = Source(name="a", path="python:packaging", pattern="*.py", join="all")
    assert path_of(source) == Path(packaging.__file__).parent
    assert "class Version" in "".join(text.text for text in read_documents(source))
    assert path_of(Source(name="b", path="python:stdlib/json")) == Path(json.__file__).parent
    with pytest.raises(ValueError, match="path of c must be of an installed package, got python:no_such"):
        path_of(Source(name="c", path="python:no_such"))
    # Packages below Python's library are no part of it.
    for folder in (".", "site-packages/other"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "text.py").write_text(folder)
    assert [text.text for text in read_documents(Source(name="d", path=str(tmp_path)))] == ["."]


def test_bfloat16_is_judged_by_its_deviation_from_float32():
    import torch

    from examples.extend_context.verify import is_within_rounding

    exact, noise = torch.randn(2, 50, 7, generator=torch.Generator().manual_seed(0))
    assert is_within_rounding(exact - 1.5 * noise, exact + noise, exact)
    assert not is_within_rounding(exact - 3 * noise, exact + noise, exact)
    assert not is_within_rounding(torch.full_like(exact, torch.nan), exact + noise, exact)
