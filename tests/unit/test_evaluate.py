"""``mtraining evaluate`` on tiny random models, whose tokens are bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from megatron_mtraining import MTrainingConfig  # noqa: E402
from megatron_mtraining.evaluate import inference, infinitebench, needle, texts  # noqa: E402
from megatron_mtraining.evaluate.model import Evaluated, load_config, load_tokenizer  # noqa: E402
from megatron_mtraining.evaluate.report import write_report  # noqa: E402
from megatron_mtraining.evaluate.results import Request, ResultFile, cells  # noqa: E402
from megatron_mtraining.evaluate.sample import Sample, read_samples, write_samples  # noqa: E402
from megatron_mtraining.evaluate.source import Source  # noqa: E402
from megatron_mtraining.launch.cli import main  # noqa: E402

LENGTH = 512
TEXT = "".join(f"Line {i} is about {'abcdefghij'[i % 10] * 5}.\n" for i in range(200))
FLAGS = ("--tasks", "niah,perplexity,copy", "--lengths", LENGTH, "--samples", 1, "--depths", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(
        vocab_size=256, num_hidden_layers=2, max_position_embeddings=LENGTH, initializer_range=0.2, **sizes
    )
    config.mtraining = {"budget": "fixed", "max_vertical": 4, "max_slash": 0, "sink_tokens": 0, "local_blocks": 1}
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def source(folder, text):
    return Source(load_tokenizer(folder), texts=[text], samples=2)


def evaluate(capsys, *flags: object) -> str:
    main(["evaluate", *map(str, flags)])
    return capsys.readouterr().out


def error(capsys, *flags: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, flags)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def results(out: Path) -> dict[str, object]:
    return json.loads((out / "results.json").read_text())


def test_a_run_and_its_continuation(folder, text, tmp_path, capsys):
    """Interrupted inside a line, in two shards, or from prepared samples: the same results as in one run."""
    flags = (folder, *FLAGS, "--text", text)
    printed = evaluate(capsys, *flags, "--inference", "dense,mtraining", "--out", tmp_path / "whole")
    whole = results(tmp_path / "whole")
    by_inference = {(cell["benchmark"], cell["inference"]): cell for cell in whole["cells"]}
    assert len(by_inference) == 6
    assert by_inference["copy", "dense"]["density"] == 1
    assert by_inference["copy", "mtraining"]["density"] < 0.5, "the configuration saved with the model"
    assert by_inference["copy", "mtraining"]["mean"] != by_inference["copy", "dense"]["mean"]
    assert by_inference["niah", "dense"]["num_samples"] == 2
    assert (tmp_path / "whole" / "table.txt").read_text().strip() in printed

    part = tmp_path / "part"
    part.mkdir()
    lines = (tmp_path / "whole" / "results_0_of_1.jsonl").read_text()
    (part / "results_0_of_1.jsonl").write_text(lines[: len(lines) // 2])
    same = ("--inference", "dense,mtraining", "--out", part)
    evaluate(capsys, *flags, *same)
    assert results(part) == whole
    assert (part / "results_0_of_1.jsonl").read_text() == lines

    evaluate(capsys, *flags, "--prepare", tmp_path / "prepared")
    prepared = (folder, *FLAGS, "--prepared", tmp_path / "prepared", "--inference", "dense,mtraining")
    divided = ("--out", tmp_path / "divided")
    assert "results are missing" in evaluate(capsys, *prepared, *divided, "--shard", "1/2")
    evaluate(capsys, *prepared, *divided, "--shard", "0/2")
    assert results(tmp_path / "divided") == whole


def test_pictures(folder, text, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    evaluate(capsys, folder, *FLAGS, "--text", text, "--inference", "dense", "--out", tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"needle", "perplexity", "copy", "accuracy"}


def test_losses_are_those_of_the_logits_and_generation_is_greedy(folder, source):
    config, own = transformers.AutoConfig.from_pretrained(folder), MTrainingConfig(pattern="dense")
    evaluated = Evaluated.load(folder, config, source.tokenizer, own, device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sample = next(texts.perplexity_samples(source, LENGTH))
    ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    found = evaluated.evaluate(sample, own)
    assert found["value"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    assert np.mean(found["by_position"]) == pytest.approx(found["value"], rel=1e-2)
    prompt = next(needle.samples(source, LENGTH))
    ids = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
    expected = model.generate(ids, max_new_tokens=prompt.max_new_tokens, do_sample=False, pad_token_id=0)
    assert evaluated.evaluate(prompt, own)["generated"] == source.decode(expected[0, len(prompt.tokens) :])


def test_kinds_of_inference(folder, source):
    """Each computes another share of the pairs of a long text; the results of all are numbers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    own = MTrainingConfig(target_recall=0.5, dense_above=1.0)
    evaluated = Evaluated.load(folder, config, source.tokenizer, own, device="cpu")
    sample = next(texts.perplexity_samples(source, 2048))
    found = {}
    for name in inference.NAMES:
        result = evaluated.evaluate(sample, inference.config_of(name, own, length=2048))
        assert np.isfinite(result["value"])
        found[name] = result["density"]
    assert len(set(found.values())) == len(inference.NAMES)
    assert found["dense"] == 1 == max(found.values()) and min(found.values()) > 0


def test_needles(folder, text):
    source = Source(load_tokenizer(folder), texts=[text], samples=1, depths=3, needles=2)
    samples = list(needle.samples(source, LENGTH))
    positions = []
    for sample in samples:
        prompt = source.decode(sample.tokens)
        assert len(sample.tokens) + sample.max_new_tokens == LENGTH
        assert prompt.count("One of the special magic numbers for") == 2
        (value,) = sample.answers
        key = prompt.rpartition("number for ")[2].split()[0]
        assert f"numbers for {key} is: {value}." in prompt
        positions.append(prompt.index(value))
        assert prompt[: prompt.index(f" One of the special magic numbers for {key}")].endswith((".", "\n"))
    assert positions == sorted(positions)
    assert [sample.coordinates["depth"] for sample in samples] == [0, 0.5, 1]
    assert needle.score(" 1234567.", ("1234567",)) == 1 and needle.score("1234", ("1234567",)) == 0


def test_copies(source):
    samples = list(texts.copy_samples(source, LENGTH))
    assert sorted({sample.coordinates["distance"] for sample in samples}) == [64, 128, 256, 480]
    for sample in samples:
        copied, distance = (sample.coordinates[name] for name in ("copied", "distance"))
        first = LENGTH - copied - distance
        assert (sample.tokens[-copied:] == sample.tokens[first : first + copied]).all()
    losses = np.arange(LENGTH - 1, dtype=np.float32)  # of tokens 1 to 511
    found = texts.measure(samples[-1], losses)
    copied, first = samples[-1].coordinates["copied"], LENGTH - copied - samples[-1].coordinates["distance"]
    assert found["value"] == losses[-copied:].mean()
    assert found["first_copy"] == losses[max(0, first - 1) : first - 1 + copied].mean()


def test_samples_depend_on_the_seed_alone(folder, text, source):
    make = [infinitebench.samples, needle.samples, texts.copy_samples]
    source.parts = again = list(infinitebench.GENERATED)
    other = Source(source.tokenizer, texts=[text], samples=2, seed=1, parts=again)
    same = Source(source.tokenizer, texts=[text], samples=2, parts=again)
    for samples in make:
        digests = [[sample.digest() for sample in samples(each, 1024)] for each in (source, same, other)]
        assert digests[0] == digests[1]
        assert not set(digests[0]) & set(digests[2])


def test_sample_files(source, tmp_path):
    written = [*needle.samples(source, LENGTH), *texts.copy_samples(source, LENGTH)]
    assert write_samples(tmp_path, written) == len(written)
    assert [sample.digest() for sample in read_samples(tmp_path)] == [sample.digest() for sample in written]
    np.save(tmp_path / "tokens.npy", np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="--prepared must be a folder that --prepare wrote"):
        read_samples(tmp_path)


def test_chat_template(folder):
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ValueError, match="without a chat template"):
        next(needle.samples(Source(tokenizer, chat=True), LENGTH))
    tokenizer.chat_template = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}<a>"
    prompt = Source(tokenizer).decode(next(needle.samples(Source(tokenizer, chat=True), LENGTH)).tokens)
    assert prompt.startswith("<u>Some special") and "provided text?</u><a>The special magic number" in prompt


def test_stretched_positions(folder, text, tmp_path, capsys):
    flags = (folder, "--tasks", "perplexity", "--lengths", 2 * LENGTH, "--text", text, "--samples", 1)
    flags += ("--inference", "dense", "--device", "cpu", "--out", tmp_path)
    assert f"--lengths must be at most {LENGTH}, the positions of tiny, got {2 * LENGTH}" in error(capsys, *flags)
    evaluate(capsys, *flags, "--stretch-positions")
    assert results(tmp_path)["models"]["tiny"]["stretched"] == 2


def blank(benchmark: str, length: int, number: int = 0, *, tokens: int = 1, new: int = 0, **coordinates) -> Sample:
    """Return a sample of zeros."""
    return Sample(
        benchmark=benchmark,
        length=length,
        number=number,
        tokens=np.zeros(tokens, np.int32),
        max_new_tokens=new,
        coordinates=coordinates,
    )


def test_prompts_beyond_their_length_do_not_change_the_factor(folder):
    long = [blank("perplexity", 2 * LENGTH), blank("ruler/niah_single_1", 2 * LENGTH, tokens=2 * LENGTH + 8, new=40)]
    for samples, positions in ((long[:1], 2 * LENGTH), (long, 2 * LENGTH + 48)):
        config, factor = load_config(folder, samples, stretch=True)
        assert factor == config.rope_parameters["factor"] == 2
        assert config.max_position_embeddings == positions
    with pytest.raises(ValueError, match=f"at most {LENGTH}, the positions of tiny, got {2 * LENGTH}"):
        load_config(folder, long, stretch=False)
    short = [blank("perplexity", LENGTH), blank("ruler/niah_single_1", LENGTH, tokens=LENGTH + 8, new=40)]
    sentence = f"lower for ruler/niah_single_1, whose prompt and answer of {LENGTH + 48} tokens.*got {LENGTH}[.]"
    for stretch in (False, True):
        assert load_config(folder, short[:1], stretch=stretch)[1] == 1
        with pytest.raises(ValueError, match=sentence):
            load_config(folder, short, stretch=stretch)


def test_errors(folder, text, tmp_path, capsys):
    out = ("--out", tmp_path / "out", "--device", "cpu", "--lengths", LENGTH)
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "the tokenizer must be in the model's folder" in error(capsys, bare, *out)
    (bare / "config.json").write_text((folder / "config.json").read_text())
    assert "the tokenizer must be in the model's folder" in error(capsys, bare, *out)
    assert "MODEL must be a Hugging Face folder" in error(capsys, tmp_path, *out, "--tokenizer", folder)
    assert "MODEL must be folders with different names" in error(capsys, folder, folder, *out)
    assert "--out must be given" in error(capsys, folder)
    assert "--text must be given for perplexity" in error(capsys, folder, *out, "--tasks", "perplexity")
    long = ("--lengths", 2**14, "--tasks", "copy", "--text", text)
    assert f"--text must be of at least {2**14} tokens" in error(capsys, folder, *out, *long)
    assert "--text must be a file that can be read" in error(capsys, folder, *out, "--text", tmp_path / "no.txt")
    assert "--lengths must be at least" in error(capsys, folder, *out[:4], "--lengths", 64)
    assert "--tasks must be some of niah" in error(capsys, folder, *out, "--tasks", "needles")
    assert "--shard must be I/N" in error(capsys, folder, *out, "--shard", "2/2")
    assert "--prepared must be a folder that --prepare wrote" in error(capsys, folder, *out, "--prepared", tmp_path)
    assert "unsupported: --parts passkey without infinitebench" in error(capsys, folder, *out, "--parts", "passkey")
    parts = ("--tasks", "infinitebench", "--parts", "math_find")
    assert "Give --infinitebench the folder of the published math_find.jsonl" in error(capsys, folder, *out, *parts)
    missing = error(capsys, folder, *out, *parts, "--infinitebench", tmp_path)
    assert "--infinitebench must be a folder with math_find.jsonl" in missing


def test_a_device_that_is_too_small(folder, text, tmp_path, capsys, monkeypatch):
    """A measurement of what fits; the rest is named, and measured alone by the same command on a larger device."""
    evaluated, find_losses = [], Evaluated._losses

    def within_512(self, tokens, metrics):
        evaluated.append(len(tokens))
        if len(tokens) > LENGTH:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return find_losses(self, tokens, metrics)

    flags = (folder, "--tasks", "copy", "--lengths", f"{LENGTH},{2 * LENGTH},{4 * LENGTH}", "--text", text)
    flags += ("--samples", 1, "--inference", "dense", "--device", "cpu", "--stretch-positions", "--out", tmp_path)
    monkeypatch.setattr(Evaluated, "_losses", within_512)
    printed = evaluate(capsys, *flags)
    assert f"--lengths must be small enough for the memory of cpu, got {2 * LENGTH} (tiny, copy, dense)" in printed
    assert evaluated == [LENGTH] * texts.DISTANCES + [2 * LENGTH], "no sample that is as long or longer is tried"
    found = results(tmp_path)
    assert [cell["length"] for cell in found["cells"]] == [LENGTH]
    assert len(found["missing"]) == 1 and f"got {2 * LENGTH}" in found["missing"][0]

    monkeypatch.setattr(Evaluated, "_losses", find_losses)
    assert "Missing" not in evaluate(capsys, *flags)
    again = results(tmp_path)
    assert again["cells"][0] == found["cells"][0] and not again["missing"]
    assert [cell["length"] for cell in again["cells"]] == [LENGTH, 2 * LENGTH, 4 * LENGTH]


def test_the_latest_error_counts_and_any_value(tmp_path):
    request = Request("model", "dense", blank("copy", 4 * LENGTH), "digest")
    for shards, result in ((4, {"error": "got 1024"}), (4, {"error": "got 2048"}), (1, {"error": "got 4096"})):
        ResultFile(tmp_path, 0, shards).append(request, result)
        os.utime(tmp_path / f"results_0_of_{shards}.jsonl", (5 - shards, 5 - shards))
        assert ResultFile(tmp_path, 1, 2).read()["digest"]["error"] == result["error"]
    for result in ({"value": 1.0}, {"error": "got 8192"}):
        ResultFile(tmp_path, 0, 1).append(request, result)
        assert ResultFile(tmp_path, 1, 2).read()["digest"]["value"] == 1


def test_samples_of_which_one_is_missing_have_no_mean(tmp_path):
    """A part of RULER that was cut keeps its mean from being made, and coordinates are not drawn."""
    names = ("ruler/niah_single_1", "ruler/ruler_vt", needle.NAME)
    requests = [
        Request("model", kind, blank(name, LENGTH, i, new=1, depth=0.5), f"{kind} {name} {i}")
        for kind in ("dense", "mtraining")
        for name in names
        for i in range(3)
    ]
    results = {request.digest: {"value": 1.0, "density": None} for request in requests}
    assert [cell.benchmark for cell in cells(requests, results)] == [*names, *names, "ruler", "ruler"]
    for name in names[1:]:
        results[f"dense {name} 2"] = {"error": f"got {LENGTH} ({name})"}
    found = [(cell.benchmark, cell.inference) for cell in cells(requests, results)]
    assert found == [(names[0], "dense"), *((name, "mtraining") for name in (*names, "ruler"))]
    write_report(tmp_path, requests, results, {})
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["missing"] == [f"got {LENGTH} ({name})" for name in names[1:]]
    assert [(entry["inference"], entry["num"]) for entry in report["needle"]] == [("mtraining", 3)]


def test_tokens_of_another_vocabulary_raise(folder, source, tmp_path, capsys):
    sample = next(texts.perplexity_samples(source, LENGTH))
    sample.tokens[3] = 300
    write_samples(tmp_path, [sample])
    flags = (folder, "--tasks", "perplexity", "--lengths", LENGTH, "--prepared", tmp_path, "--out", tmp_path / "out")
    assert "--prepared must be of tokens below 256" in error(capsys, *flags, "--device", "cpu")


def test_a_model_that_scales_its_logits_raises(folder, tmp_path):
    model = transformers.CohereForCausalLM(
        transformers.CohereConfig(
            vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unsupported: mtraining evaluate with CohereForCausalLM"):
        Evaluated.load(tmp_path, config, None, None, device="cpu")
