"""The example of a real model, on a tiny one of random weights: fetch's texts, training, its resumption, the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from examples.real_model import fetch
from examples.real_model.__main__ import main
from examples.real_model.runs import RUNS, config_of_run
from examples.real_model.texts import training_documents
from megatron_mtraining import MTrainingConfig

SMALL = MTrainingConfig(budget="fixed", max_vertical=8, max_slash=0, dense_below=0)
"""Of 512 tokens the named runs select nearly all."""

TRAINED = ("untrained", "dense", "default", "small", "moba")


@pytest.fixture(autouse=True, scope="module")
def small_run():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RUNS, "small", lambda: SMALL)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    (folder / "texts").mkdir()
    draw = np.random.default_rng(0)
    np.save(folder / "texts" / "a.npy", draw.integers(0, 512, 4 * 512, dtype=np.uint16))
    np.save(folder / "texts" / "held_out.npy", draw.integers(0, 512, (2, 640), dtype=np.uint16))
    return folder


def train(cache, out, *flags: str) -> None:
    sizes = ["--length", "512", "--steps", "2", "--held-out", "2", "--tiny", "--device", "cpu"]
    main(["train", "--cache", str(cache), "--out", str(out), *sizes, *flags])


@pytest.fixture(scope="module")
def results(cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    train(cache, out, "--runs", ",".join(TRAINED))
    return out


def read(out, run: str) -> dict:
    return json.loads((out / f"{run}_a_0.json").read_text())


def test_each_run_trains_and_is_measured(results):
    for run in TRAINED:
        result = read(results, run)
        assert len(result["loss"]) == len(result["step_ms"]) == (0 if run == "untrained" else 2)
        attention = {"dense", "default" if run in ("dense", "untrained") else "own"}
        assert set(result["held_out"]) == attention
        for measured in result["held_out"].values():
            assert 5 < measured["loss"] < 7.5  # ln 512 is 6.2
            assert len(measured["loss_by_position"]) == 8 and len(measured["loss_by_document"]) == 2
        assert len(result["recall_by_layer"]) == 2
    assert read(results, "dense")["density_by_layer"] == [1.0, 1.0]
    assert all(share < 0.6 for share in read(results, "small")["density_by_layer"])


def test_attention_of_the_runs_differs(results):
    losses = {run: read(results, run)["loss"][1] for run in ("dense", "default", "small", "moba")}
    assert losses["dense"] == pytest.approx(losses["moba"], rel=1e-3)  # its one chunk is the whole text
    assert losses["small"] != losses["dense"]


def test_activation_checkpointing_trains_alike(cache, results, tmp_path):
    train(cache, tmp_path, "--runs", "small", "--recompute")
    assert read(tmp_path, "small")["loss"] == read(results, "small")["loss"]
    assert read(tmp_path, "small")["density_by_layer"] == read(results, "small")["density_by_layer"]


def test_an_ended_run_continues(cache, results, tmp_path, monkeypatch, capsys):
    from examples.real_model import train as module

    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "OBSERVED_EVERY", 1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "evaluate", end)
        with pytest.raises(KeyboardInterrupt):
            train(cache, tmp_path, "--runs", "small", "--save-every", "1")
    assert (tmp_path / "small_a_0.pt").exists()
    train(cache, tmp_path, "--runs", "small")
    assert "small_a_0: continues at step 1" in capsys.readouterr().out
    assert read(tmp_path, "small")["loss"] == read(results, "small")["loss"]
    assert not (tmp_path / "small_a_0.pt").exists()
    train(cache, tmp_path, "--runs", "small")
    assert "small_a_0.json: finished before" in capsys.readouterr().out


def test_report(results, capsys):
    pytest.importorskip("matplotlib")
    main(["report", "--out", str(results)])
    table = capsys.readouterr().out
    rows = {line.split()[1]: line for line in table.splitlines() if line.startswith("| ")}
    assert set(TRAINED) < set(rows)
    assert "100.0 %" in rows["dense"] and "%)" not in rows["dense"].split("|")[3]
    assert rows["small"].count("%)") == 2
    assert (results / "report.md").read_text() == table
    assert (results / "report.png").stat().st_size > 10_000


def test_documents_do_not_repeat_and_follow_the_seed(cache):
    tokens = np.load(cache / "texts" / "a.npy").reshape(4, 512).astype(np.int64)
    first, other = (training_documents(cache, "a", length=512, count=4, seed=seed) for seed in (0, 1))
    assert sorted(first.tolist()) == sorted(tokens.tolist())
    assert not first.equal(other)


def test_configurations_of_the_runs():
    assert {config_of_run(run).pattern for run in RUNS} == {"dense", "vertical_slash", "moba", "xattention"}
    assert config_of_run("cost98").target_recall == 0.98
    assert config_of_run("algorithm1").estimator == "last_window"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--runs", "sparse"], "--runs must be some of untrained, dense"),
        (["--texts", "c"], "--cache must be a folder with texts/c.npy"),
        (["--steps", "5"], "--texts must be of at least 5 documents of 512 tokens, got a: 4"),
        (["--length", "1024", "--steps", "1"], "texts/held_out.npy must be of at least 2 documents of 1024 tokens"),
    ],
)
def test_errors(cache, tmp_path, capsys, flags, sentence):
    with pytest.raises(SystemExit) as ended:
        train(cache, tmp_path, *flags)
    assert ended.value.code == 2
    assert f"real_model train: error: {sentence}" in capsys.readouterr().err


def test_weights_must_be_fetched(cache, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--cache", str(cache), "--out", str(tmp_path)])
    assert "Run: python -m examples.real_model fetch" in capsys.readouterr().err


class Characters:
    """Tokenizer whose tokens are the characters of a text."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(character) % 512 for character in text]}


def test_tokens_of_a_folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.py").write_text("xy")
    (tmp_path / "c.txt").write_text("z")
    (tmp_path / "d.bin").write_bytes(b"\0")
    text = "".join(map(chr, fetch.tokens_of(str(tmp_path), Characters(), at_most=10**6)))
    assert text == "\n# file: c.txt\n\nz\n# file: inner/b.py\n\nxy"
    assert len(fetch.tokens_of(str(tmp_path), Characters(), at_most=7)) == 7


def test_held_out_documents_take_the_sources_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "HELD_OUT_LENGTH", 20)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(name * 200)
    documents = fetch.held_out_documents([str(tmp_path / "a"), str(tmp_path / "b")], Characters(), count=4)
    assert documents.shape == (4, 20)
    assert [chr(document[-1]) for document in documents[2:]] == ["a", "b"]


@pytest.mark.parametrize("source", ["nowhere", "python:nowhere"])
def test_sources_that_are_missing(source, tmp_path):
    with pytest.raises(ValueError, match="a source must be"):
        fetch.folder_of(source, tmp_path)


def test_texts_of_the_command_line():
    assert fetch.parse_text("a=x,python:y") == ("a", ["x", "python:y"])
    with pytest.raises(ValueError, match="--text must be NAME=SOURCE"):
        fetch.parse_text("a")


def test_attention_is_measured(cache, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    flags = ["--length", "640", "--every", "1", "--times", "1", "--layers", "2", "--tiny", "--device", "cpu"]
    main(["attention", "--cache", str(cache), "--out", str(tmp_path), *flags])
    result = json.loads((tmp_path / "attention.json").read_text())
    assert result["layers"] == [1, 2]
    for layer in ("1", "2"):
        assert 0 < result["gradient"][layer]["selected keys"] <= result["gradient"][layer]["best keys"] + 1e-4
        assert result["mass"][layer]["best 1% of keys"] < result["mass"][layer]["best 20% of keys"] < 1
        assert 0 < result["recall"][layer] <= 1 + 1e-5
    assert [each["step"] for each in result["over_steps"]] == [1]
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_scores_by_distance_follow_rotary_embedding_where_query_and_key_are_constant():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from examples.real_model.attention import Layer, distance_fit

    sizes = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 1024}
    config = LlamaConfig(vocab_size=8, num_hidden_layers=1, rope_parameters=rope, **sizes)
    model = LlamaForCausalLM(config)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(600)[None])

    def rotated(vector: torch.Tensor) -> torch.Tensor:
        first, second = vector.chunk(2)
        return vector * cos[0] + torch.cat([-second, first]) * sin[0]

    query, other, key = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    layer = Layer(torch.stack([rotated(query), rotated(other)], 1)[None], rotated(key)[None, :, None], key, None)
    fit = distance_fit(model, layer)
    torch.testing.assert_close(torch.tensor(fit["measured"]), torch.tensor(fit["predicted"]), rtol=1e-3, atol=1e-3)
    assert fit["correlation"] > 0.999


def test_the_page_has_the_measured_table():
    from examples.real_model import report

    root = Path(__file__).parents[2]
    folder = root / "docs/benchmarks/real_model_h200_2026-12-01"
    assert report.table(report.load(folder)).split("\n\n", 1)[1].strip() in (root / "docs/real_model.md").read_text()
