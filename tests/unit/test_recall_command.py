"""``mtraining recall`` on a tiny random model, on token files and on saved layers."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.launch.cli import main
from megatron_mtraining.recall.layers import load_layer
from megatron_mtraining.recall.measure import Summary, propose, selections
from tools.synthetic_layer import synthetic_layer

LENGTH = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=512, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    numpy = pytest.importorskip("numpy")
    path = tmp_path_factory.mktemp("texts") / "tokens.npy"
    numpy.save(path, torch.randint(0, 64, (2, LENGTH + 5), generator=torch.Generator().manual_seed(0)).short().numpy())
    return path


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    path = tmp_path_factory.mktemp("layers") / "qk.pt"
    draw = torch.Generator().manual_seed(0)
    sample = synthetic_layer(seq_len=LENGTH, num_heads=2, num_kv_heads=1, head_dim=64, generator=draw)
    torch.save({"query": sample.query, "key": sample.key}, path)
    return path


def recall(capsys, *flags: object) -> str:
    main(["recall", *map(str, flags)])
    return capsys.readouterr().out


def refusal(capsys, *flags: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["recall", *map(str, flags)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_model_reads_tokens(model, tokens, tmp_path, capsys):
    flags = ("--length", LENGTH, "--rows", 8, "--max-texts", 2, "--out", tmp_path, "--device", "cpu")
    result = json.loads(recall(capsys, "--model", model, "--text", tokens, "--json", *flags))
    assert json.loads((tmp_path / "recall.json").read_text()) == result
    measured = result["selections"]
    assert set(measured) == set(selections(length=LENGTH))
    for each in measured.values():
        assert set(each["density_by_layer"]) == set(each["recall_by_layer"]) == {"1", "2"}
        assert 0 < each["density"] <= 1 and 0 < each["recall"] <= 1 + 1e-6
    densities = [measured[f"cost {target}"]["density"] for target in ("0.8", "0.95")]
    assert densities == sorted(densities)


def test_more_recall_costs_more_pairs(layer, capsys):
    """On planted structure, and every layer and head is in the table."""
    out = recall(capsys, "--load", layer, layer, "--targets", 0.2, 0.5, "--rows", 16, "--device", "cpu")
    rows = {line[:18].strip(): line[18:].split() for line in out.splitlines() if line.startswith(("cost", "algorithm"))}
    (low, recalled_low), (high, recalled_high) = ((float(x) for x in rows[f"cost {t}"][:2]) for t in ("0.2", "0.5"))
    assert 0 < low < high < 100 and 20 < recalled_low < recalled_high < 100
    assert "For a recall of 0.95 on rows that were not probed: --mtraining-target-recall 0.5" in out
    assert "No target that was measured reaches 0.95" in out


def test_flags_of_a_run_are_a_selection(layer, capsys):
    flags = ("--mtraining-target-recall", 0.3, "--mtraining-index-sharing", "kv_group")
    out = recall(capsys, "--load", layer, "--targets", 0.9, "--rows", 4, "--json", "--device", "cpu", *flags)
    own = json.loads(out)["selections"]["these flags"]["config"]
    assert (own["target_recall"], own["index_sharing"]) == (0.3, "kv_group")


def test_picture(layer, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    recall(capsys, "--load", layer, "--targets", 0.9, "--rows", 4, "--out", tmp_path, "--device", "cpu")
    assert (tmp_path / "recall.png").stat().st_size > 10_000


def summary(recall: float, *, layers: dict[int, tuple[float, float]]) -> Summary:
    densities, recalls = ({layer: pair[i] for layer, pair in layers.items()} for i in (0, 1))
    return Summary(0.1, recall, densities, recalls, (1, 0, 0.1))


def test_proposal():
    configs = {f"cost {t}": MTrainingConfig(target_recall=t) for t in (0.9, 0.95)}
    summaries = {
        "cost 0.9": summary(0.91, layers={1: (0.3, 0.91), 2: (0.1, 0.91)}),
        "cost 0.95": summary(0.96, layers={1: (0.9, 0.99), 2: (0.5, 0.96), 3: (0.1, 0.84)}),
    }
    chosen = propose(configs, summaries, goal=0.95)
    assert (chosen.target_recall, chosen.dense_layers, chosen.is_reached) == (0.95, (1, 3), True)
    assert chosen.flags == "--mtraining-target-recall 0.95 --mtraining-dense-layers 1 3"
    assert propose(configs, summaries, goal=0.9).target_recall == 0.9
    assert not propose(configs, summaries, goal=0.97).is_reached


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "--load must be a file that can be read"),
        (b"", "--load must be a file that torch.save wrote"),
        ({"query": torch.zeros(1, 8, 1, 4)}, "without key"),
        ({"query": torch.zeros(8, 1, 4), "key": torch.zeros(8, 1, 4)}, "query"),
    ],
)
def test_files_that_hold_no_layer(content, sentence, tmp_path):
    path = tmp_path / "qk.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=sentence):
        load_layer(path, 1)


def test_errors(model, tokens, layer, tmp_path, capsys):
    assert "--text must be given with --model" in refusal(capsys, "--model", model)
    assert "with config.json" in refusal(capsys, "--model", tmp_path, "--text", tokens)
    assert "of at least 9999 tokens" in refusal(capsys, "--model", model, "--text", tokens, "--length", 9999)
    assert "--text must be a file that can be read" in refusal(capsys, "--model", model, "--text", tmp_path / "no.npy")
    assert "--length must be so long" in refusal(capsys, "--model", model, "--text", tokens, "--length", 300)
    assert "--goal must be in (0, 1]" in refusal(capsys, "--load", layer, "--goal", 2)
