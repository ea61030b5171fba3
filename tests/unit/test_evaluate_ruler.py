"""RULER's samples and numbers against those of lm-eval itself, on a tiny random model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from megatron_mtraining import MTrainingConfig, hf  # noqa: E402
from megatron_mtraining.evaluate import ruler  # noqa: E402
from megatron_mtraining.evaluate.model import Evaluated, load_config, load_tokenizer  # noqa: E402
from megatron_mtraining.evaluate.source import Source  # noqa: E402

LENGTH, SAMPLES = 1024, 2
SPARSE = MTrainingConfig(budget="fixed", max_vertical=8, max_slash=0, sink_tokens=4, local_blocks=1, dense_below=0)


@pytest.fixture(scope="module")
def lm_eval():
    for name in ("nltk", "wonderwords", "accelerate", "lm_eval"):
        module = pytest.importorskip(name)
    return module


@pytest.fixture(scope="module")
def folder(lm_eval, tmp_path_factory):
    """A model whose tokenizer has words: with bytes alone RULER's examples do not fit."""
    import wonderwords

    folder = tmp_path_factory.mktemp("models") / "words"
    words = [word for kind in ("nouns", "adjectives", "verbs") for word in wonderwords.RandomWord()._categories[kind]]
    vt_utils = importlib.import_module("lm_eval.tasks.ruler.vt_utils")
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    text = [" ".join(words[::8]), *[noise + vt_utils.TEMPLATE] * 50]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, special_tokens=["<end>"])
    tokenizer.train_from_iterator(text, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(
        vocab_size=1500, num_hidden_layers=2, max_position_embeddings=2048, eos_token_id=0, bos_token_id=None, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def source(folder):
    return Source(load_tokenizer(folder), samples=SAMPLES)


@pytest.mark.parametrize("name", ["niah_single_1", "ruler_vt"])
def test_samples_and_numbers_are_those_of_lm_eval(lm_eval, folder, source, name):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    source.parts = [name]
    samples = list(ruler.samples(source, LENGTH))
    config, _ = load_config(folder, length=LENGTH, stretch=False)
    evaluated = Evaluated.load(folder, config, source.tokenizer, None, device="cpu")
    found = [evaluated.evaluate(sample, SPARSE) for sample in samples]
    assert all(result["density"] < 0.5 for result in found)

    hf.configure(evaluated.model, SPARSE)
    ruler_folder = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    written = evaluator.simple_evaluate(
        HFLM(pretrained=evaluated.model, tokenizer=source.tokenizer, batch_size=1, max_length=2048),
        tasks=[name],
        limit=SAMPLES,
        bootstrap_iters=0,
        task_manager=TaskManager(
            include_path=str(ruler_folder),
            include_defaults=False,
            metadata={"max_seq_lengths": [LENGTH], "tokenizer": str(folder)},
        ),
    )
    assert len(samples) == len(written["samples"][name]) == SAMPLES
    for sample, result, expected in zip(samples, found, written["samples"][name], strict=True):
        context = expected["arguments"][0][0]
        assert source.decode(sample.tokens) == context
        assert result["generated"].strip() == expected["resps"][0][0].strip()
        assert result["value"] == expected[str(LENGTH)]
    mean = np.mean([result["value"] for result in found])
    assert written["results"][name][f"{LENGTH},none"] == pytest.approx(mean)


def question_files(folder: Path) -> None:
    """Files of the published forms."""
    questions = [
        {
            "question": f"Who wrote book {i}?",
            "is_impossible": False,
            "answers": [{"text": f"Author{i}"}],
        }
        for i in range(4)
    ]
    paragraphs = [{"context": f"Author{i} wrote book {i}.", "qas": [each]} for i, each in enumerate(questions)]
    (folder / "dev-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [
        {"question": f"Who built {i}?", "answer": f"Builder{i}", "context": [[f"House {i}", [f"Builder{i} built it."]]]}
        for i in range(4)
    ]
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpot))


def test_each_task_makes_samples(source, tmp_path, capsys):
    text, questions = tmp_path / "essay.txt", tmp_path
    text.write_text(" ".join(f"Sentence {i} is of an essay about noun {i % 7}." for i in range(400)))
    without = {sample.benchmark for sample in ruler.samples(source, LENGTH)}
    assert without == {f"ruler/{name}" for name in ruler.GENERATED}
    assert "RULER runs 6 of 13 tasks. niah_single_2: Give --text." in capsys.readouterr().err
    question_files(questions)
    given = Source(source.tokenizer, samples=SAMPLES, texts=[text], ruler=questions)
    samples = list(ruler.samples(given, LENGTH))
    assert {sample.benchmark for sample in samples} == {f"ruler/{name}" for name in ruler.PARTS}
    assert len(samples) == SAMPLES * len(ruler.PARTS)
    for sample in samples:
        assert len(sample.tokens) + sample.max_new_tokens <= LENGTH + 64, "the beginning of the answer is not counted"
        prompt = source.decode(sample.tokens)
        assert all(answer in prompt for answer in sample.answers)
    again = {sample.benchmark: sample.digest() for sample in ruler.samples(given, LENGTH)}
    assert again == {sample.benchmark: sample.digest() for sample in samples}
    given.parts = ["ruler_cwe"]  # alone as among others
    assert [sample.digest() for sample in ruler.samples(given, LENGTH)][-1] == again["ruler/ruler_cwe"]


def test_scores():
    assert ruler.score("It is ALPHA, beta", ("alpha", "Beta", "gamma", "delta")) == 0.5


def test_errors(source, tmp_path, monkeypatch):
    def error(**changes: object) -> str:
        given = Source(source.tokenizer, samples=1, **changes)
        with pytest.raises(ValueError) as raised:
            list(ruler.samples(given, LENGTH))
        return str(raised.value)

    assert "--parts must be tasks whose texts are given, got niah_single_2. Give --text." in error(
        parts=["niah_single_2"]
    )
    assert "Give --ruler a folder with dev-v2.0.json." in error(parts=["ruler_qa_squad"], ruler=tmp_path)
    assert "unsupported: --chat with ruler" in error(chat=True)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'megatron-mtraining[eval]'" in error(parts=["niah_single_1"])
