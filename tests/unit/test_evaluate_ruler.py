"""RULER by lm-eval: with a stand-in of its modules, and with lm-eval itself where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import re
import sys
from types import SimpleNamespace

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("transformers")

from megatron_mtraining.evaluate import ruler  # noqa: E402
from megatron_mtraining.evaluate.benchmarks import score  # noqa: E402
from megatron_mtraining.evaluate.source import Source  # noqa: E402

DOCUMENTS = '''
from tqdm import tqdm
def documents(max_seq_lengths, tokenizer, text, **_):
    """Documents of one length, of which there are 500 without a cut."""
    return [
        {"input": f"{text} {i}", "outputs": [f"{i}", "b"], "max_length": length, "gen_prefix": "is"}
        for length in max_seq_lengths for i in tqdm(range(500), desc="documents")
    ]
'''
STAND_IN = {
    "lm_eval/__init__.py": "",
    "lm_eval/tasks/__init__.py": """
from types import SimpleNamespace
class TaskManager:
    def __init__(self, include_defaults, include_path, metadata):
        self.metadata = metadata
    def load(self, group):
        (part,) = group["task"]
        documents = part["custom_dataset"](**self.metadata)
        return {"tasks": {part["task"]: Part(documents)}}
class Part:
    def __init__(self, documents):
        self.documents = documents
    def build_all_requests(self, limit, apply_chat_template, chat_template):
        def prompt(document):
            if not apply_chat_template:
                return f"{document['input']} {document['gen_prefix']}"
            messages = [{"role": "user", "content": document["input"]}]
            return chat_template(messages, add_generation_prompt=False)
        self.instances = [
            SimpleNamespace(doc=each, args=(prompt(each), {"max_gen_toks": 3})) for each in self.documents[:limit]
        ]
""",
    "lm_eval/tasks/ruler/common_utils.py": """
def process_results(document, results):
    found = sum(each in results[0] for each in document["outputs"]) / len(document["outputs"])
    return {"4096": -1.0, str(document["max_length"]): found}
def process_results_part(document, results):
    return {"4096": -1.0, str(document["max_length"]): float(any(each in results[0] for each in document["outputs"]))}
""",
    "lm_eval/tasks/ruler/prepare_niah.py": "from functools import cache\nimport nltk\nnltk.download('punkt_tab')\n"
    + DOCUMENTS
    + """
class datasets:
    def load_dataset(name, split):
        raise ConnectionError(f"no network for\\n{name}")
@cache
def get_haystack():
    return datasets.load_dataset("essays", split="train")["text"]
def cached_sent_tokenize(text):
    return nltk.data.find("rules")
""",
    "lm_eval/tasks/ruler/niah_utils.py": """
from lm_eval.tasks.ruler import prepare_niah
def niah_single_1(**options):
    return prepare_niah.documents(text="hay", **options)
def _of_essays(**options):
    (text,) = prepare_niah.get_haystack()
    return prepare_niah.documents(text="|".join(prepare_niah.cached_sent_tokenize(text)), **options)
niah_single_2 = niah_single_3 = niah_multikey_1 = niah_multiquery = niah_multivalue = _of_essays
niah_multikey_2 = niah_multikey_3 = niah_single_1
""",
    "lm_eval/tasks/ruler/vt_utils.py": DOCUMENTS
    + """
def generate_input_output(noises, chains, hops, is_icl=False):
    return "word " * 10 * noises, ["A"] * (hops + 1)
def get_vt_dataset(**options):
    return documents(text="chains", **options)
""",
    "lm_eval/tasks/ruler/cwe_utils.py": DOCUMENTS
    + """
import random
RNG = random.Random(42)
def generate_input_output(words, length):
    return "word " * 5 * words, "word " * 5 * words, ["A"] * 10
def get_cw_dataset(**options):
    return documents(text=f"{RNG.random()} {random.random()}", **options)
""",
    "lm_eval/tasks/ruler/fwe_utils.py": DOCUMENTS
    + """
TEMPLATE = "word " * 90
def fwe_download(**options):
    return documents(text="coded", **options)
""",
    "lm_eval/tasks/ruler/qa_utils.py": DOCUMENTS
    + """
def download_json(url):
    raise ConnectionError(f"no network for {url}")
def _questions(url, **options):
    return documents(text=download_json(url)["question"], **options)
def get_squad(**options):
    return _questions("https://host/dev-v2.0.json", **options)
def get_hotpotqa(**options):
    return _questions("https://host/v1/hotpot_dev_distractor_v1.json", **options)
""",
    "nltk/__init__.py": """
def download(name):
    return False
class data:
    path = []
    def find(name):
        raise LookupError(name)
""",
}


class Letters:
    """Tokenizer whose tokens are the words of a text, by number of letters."""

    bos_token_id = None
    name_or_path = "folder"
    chat_template = "a template"

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
        assert options["add_generation_prompt"] != options.get("continue_final_message", False)
        return f"<user> {messages[0]['content']} <assistant>"


def forget(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lm_eval", "nltk")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    for name, text in STAND_IN.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    forget(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lm_eval", "nltk")]:
        del sys.modules[name]


def source(*parts: str, **options: object) -> Source:
    return Source(Letters(), samples=2, parts=parts, **options)


def texts_of(samples: list) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_samples_and_scores_are_those_of_lm_eval(stand_in):
    samples = [*ruler.samples(source("niah_single_1"), 4096), *ruler.samples(source("niah_single_1"), 8192)]
    assert texts_of(samples) == [words("hay 0 is"), words("hay 1 is")] * 2
    assert [(sample.benchmark, sample.length, sample.number) for sample in samples] == [
        ("ruler/niah_single_1", length, number) for length in (4096, 8192) for number in (0, 1)
    ]
    assert samples[1].answers == ("1", "b") and samples[1].max_new_tokens == 3
    assert [score(samples[1], text) for text in ("1 b", "1", "none")] == [1, 0.5, 0]
    assert [score(samples[3], text) for text in ("1 b", "1", "none")] == [1, 0.5, 0]


def test_draws_depend_on_seed_part_and_length_alone(stand_in):
    """Not on what was drawn before, by Python's generator or by one of a module of lm-eval."""
    found = [texts_of(list(ruler.samples(source("ruler_cwe", seed=seed), 4096))) for seed in (0, 0, 1)]
    random.seed(7)
    found.append(texts_of(list(ruler.samples(source("ruler_cwe"), 4096))))
    assert found[0] == found[1] == found[3] and len(found[2]) == 2


def test_chat(stand_in):
    (sample, _) = ruler.samples(source("niah_single_1", chat=True), 4096)
    assert sample.tokens.tolist() == words("<user> hay 0 <assistant>")


def test_parts_without_their_data_are_skipped_or_raise(stand_in, tmp_path, capsys):
    offline = list(ruler.samples(source(), 4096))
    printed = capsys.readouterr().err
    skipped = [name for name in ruler.PARTS if f"ruler/{name}, 4096: skipped" in printed]
    assert len(skipped) == 7 and "no network for essays" in printed
    assert {sample.benchmark for sample in offline} == {f"ruler/{name}" for name in ruler.PARTS if name not in skipped}
    with pytest.raises(ValueError, match="without ruler_qa_squad, got it, whose data cannot be had: no network"):
        list(ruler.samples(source("ruler_qa_squad"), 4096))
    with pytest.raises(ValueError, match="cannot be had: no essays"):
        list(ruler.samples(source("niah_single_2", ruler=tmp_path), 4096))

    (tmp_path / "essay.txt").write_text("An essay. Of two sentences.")
    nltk = sys.modules["nltk"]
    download = nltk.download
    eleven = list(ruler.samples(source(ruler=tmp_path), 4096))
    assert len(eleven) == 2 * 11 and nltk.download is download
    assert "sentences of the essays end at . ! ?" in capsys.readouterr().err
    essays = [sample for sample in eleven if sample.benchmark == "ruler/niah_single_2"]
    assert texts_of(essays)[0] == words("An essay.|Of two sentences. 0 is")

    for name in ("dev-v2.0.json", "hotpot_dev_distractor_v1.json"):
        (tmp_path / name).write_text(json.dumps({"question": "who"}))
    thirteen = list(ruler.samples(source(ruler=tmp_path), 4096))
    assert len(thirteen) == 2 * 13
    assert texts_of([thirteen[-1]]) == [words("who 1 is")]
    assert [score(thirteen[-1], text) for text in ("1 b", "1", "none")] == [1, 1, 0], "any answer to a question counts"

    (tmp_path / "dev-v2.0.json").write_text("no JSON")
    with pytest.raises(ValueError, match="--ruler must be a folder whose dev-v2.0.json is the published file"):
        list(ruler.samples(source("ruler_qa_squad", ruler=tmp_path), 4096))


def test_data_that_raise_a_value_error_are_missing_data(stand_in, monkeypatch, capsys):
    """As ``datasets`` does offline; where the documents themselves raise it, the length is too small."""

    def raise_value_error(*_: object, **__: object) -> None:
        raise ValueError("no copy of the essays")

    prepare = importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
    monkeypatch.setattr(prepare.datasets, "load_dataset", raise_value_error)
    assert list(ruler.samples(source(), 4096))
    assert "ruler/niah_single_2, 4096: skipped, its data cannot be had: no copy" in capsys.readouterr().err
    with pytest.raises(ValueError, match="without niah_single_2, got it, whose data cannot be had: no copy"):
        list(ruler.samples(source("niah_single_2"), 4096))
    monkeypatch.setattr(prepare, "documents", raise_value_error)
    with pytest.raises(ValueError, match="--lengths must be larger for ruler/niah_single_1"):
        list(ruler.samples(source("niah_single_1"), 4096))


@pytest.mark.parametrize(("part", "least"), [("ruler_vt", 640), ("ruler_cwe", 246), ("ruler_fwe", 200)])
def test_lengths_at_which_lm_eval_would_draw_forever_raise(stand_in, part, least):
    assert list(ruler.samples(source(part), least))
    with pytest.raises(ValueError, match=f"--lengths must be at least {least} for ruler/{part}"):
        list(ruler.samples(source(part), least - 1))


def test_lm_eval_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        ImportError, match=r"lm-eval must be installed for ruler.*pip install 'megatron-mtraining\[eval\]'"
    ):
        list(ruler.samples(source(), 4096))


# With lm-eval itself.

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
ESSAY = " ".join(f"Sentence {i} of an essay has {i % 7} words or more{'.!?'[i % 3]}" for i in range(4000))
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {i} on cities.",
                    "qas": [{"question": f"Which {i}?", "answers": [{"text": f"c{i}"}], "is_impossible": False}] * 10,
                }
            ]
        }
        for i in range(600)
    ]
}
HOTPOT = [
    {"question": f"Who {i}?", "answer": f"a{i}", "context": [[f"Title {i}", [f"Text {i}.", "More."]]]}
    for i in range(600)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the files that lm-eval downloads, and beside it one with a tokenizer whose tokens are words."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("ruler")
    (folder / "essay.txt").write_text(ESSAY)
    (folder / "dev-v2.0.json").write_text(json.dumps(SQUAD))
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(HOTPOT))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "tokenizer")
    return folder


class Prompts(Source):
    """Source that stores the prompts that it encodes."""

    def encode(self, text: str) -> np.ndarray:
        self.encoded = [*getattr(self, "encoded", []), text]
        return super().encode(text)


@needs_lm_eval
@pytest.mark.parametrize("part", ruler.PARTS)
def test_prompts_and_scores_of_lm_eval(folder, part, monkeypatch):
    """As of a run of lm-eval with this part and length: its first documents, all of which fit the length."""
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    length, tokenizer = 2048, AutoTokenizer.from_pretrained(folder / "tokenizer")
    ours = Prompts(tokenizer, samples=3, parts=[part], ruler=folder)
    samples = list(ruler.samples(ours, length))
    assert len(samples) == 3
    assert all(1000 < len(sample.tokens) <= length + 20 for sample in samples)

    monkeypatch.delitem(sys.modules, f"lm_eval.tasks.ruler.{ruler.PARTS[part][0]}")
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: {"text": [ESSAY]})
    prepare = "lm_eval.tasks.ruler.prepare_niah"  # whose import is slow
    monkeypatch.setattr(f"{prepare}.cached_sent_tokenize", lambda text: re.split(r"(?<=[.!?])\s+", text))
    sys.modules[prepare].get_haystack.cache_clear()
    published = {"squad": SQUAD, "hotpot": HOTPOT}[part.rpartition("_")[2]] if "_qa_" in part else None
    response = SimpleNamespace(raise_for_status=lambda: None, json=lambda: published)
    monkeypatch.setattr("requests.get", lambda *_, **__: response)
    random.seed(0)
    np.random.seed(1234)
    metadata = {"tokenizer": str(folder / "tokenizer"), "max_seq_lengths": [length]}
    theirs = TaskManager(metadata=metadata).load([part])["tasks"][part]
    assert len(theirs.test_docs()) == 500
    theirs.build_all_requests(limit=3)
    assert [request.args[0] for request in theirs.instances] == ours.encoded[-3:]
    for sample, request in zip(samples, theirs.instances, strict=True):
        for generated in (" ".join(sample.answers), sample.answers[0], "none"):
            expected = theirs.process_results(request.doc, [generated])[str(length)]
            assert score(sample, generated) == expected
        assert sample.max_new_tokens == request.args[1]["max_gen_toks"]
