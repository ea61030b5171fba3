"""InfiniteBench: generated parts, files in the published form, and scores by the authors' rules."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("numpy")

from megatron_mtraining.evaluate.infinitebench import GENERATED, PARTS, samples, score
from megatron_mtraining.evaluate.source import Source

LENGTH = 2048


class Bytes:
    """Tokenizer whose tokens are bytes."""

    bos_token_id = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], **_: object) -> str:
        return bytes(tokens).decode(errors="replace")


def source(**options: object) -> Source:
    return Source(Bytes(), **({"samples": 3} | options))


@pytest.mark.parametrize("part", GENERATED)
def test_generated_parts(part):
    """Prompts fill the length but for less than two lines, and hold their answer."""
    for sample in samples(source(parts=[part]), LENGTH):
        prompt, total = source().decode(sample.tokens.tolist()), len(sample.tokens) + sample.max_new_tokens
        assert LENGTH - 200 < total <= LENGTH and sample.coordinates == {"cut": 0}
        assert sample.answers[0] in prompt
        if part == "kv_retrieval":
            pairs = json.loads(prompt[prompt.index("{") : prompt.index("}") + 1])
            key = prompt.rpartition("Key: ")[2].split('"')[1]
            assert pairs[key] == sample.answers[0]


BOOK = {"id": 0, "context": "A long book. " * 20, "input": "Who?", "answer": ["Ann Lee", "Ann"], "options": []}
LINES = {
    "passkey": {"context": "hay " * 9, "input": "What is the pass key?", "answer": ["71432"], "options": []},
    "kv_retrieval": {"context": "{}", "input": "Key: a", "answer": ["9f"], "options": []},
    "longbook_qa_eng": BOOK,
    "longbook_choice_eng": BOOK | {"answer": ["Bo"], "options": ["Al", "Bo", "Cy", "Di"]},
    "longbook_sum_eng": BOOK | {"answer": ["Ann sleeps."]},
    "longdialogue_qa_eng": BOOK | {"answer": ["ACE"]},
    "math_find": {"context": "[1, 2]", "input": "largest?", "answer": 2, "options": []},
    "math_calc": {"context": "1 + 2", "input": "", "answer": [1, 3], "options": []},
    "code_run": {"context": "def func_1(x):", "input": "value of func_1(-4).", "answer": -4, "options": ""},
    "code_debug": {"context": "def f():", "input": "", "answer": ["g"], "options": ["f", "g", "h", "i"]},
}


def test_published_files(tmp_path):
    for part, line in LINES.items():
        (tmp_path / f"{part}.jsonl").write_text("\n".join([json.dumps(line)] * 4) + "\n")
    found = list(samples(source(infinitebench=tmp_path, parts=list(LINES)), 4096))
    assert [sample.benchmark for sample in found[::3]] == [f"infinitebench/{part}" for part in LINES]
    prompts = {sample.benchmark.partition("/")[2]: source().decode(sample.tokens.tolist()) for sample in found}
    answers = {sample.benchmark.partition("/")[2]: sample.answers for sample in found}
    assert prompts["longbook_choice_eng"].endswith("C. Cy\nD. Di\n\nThe letter of the correct answer is")
    assert answers["longbook_choice_eng"] == ("Bo", "B") and answers["code_debug"] == ("g", "B")
    assert "a function called func_1 in" in prompts["code_run"] and "value of func_1(-4) is" in prompts["code_run"]
    assert answers["math_calc"] == ("1", "3") and answers["longbook_qa_eng"] == ("Ann Lee", "Ann")


def test_a_longer_prompt_is_cut_in_the_middle(tmp_path):
    (tmp_path / "longbook_qa_eng.jsonl").write_text(json.dumps(BOOK))
    whole, cut = (next(samples(source(infinitebench=tmp_path, parts=["longbook_qa_eng"]), n)) for n in (4096, 200))
    assert len(cut.tokens) == 160 and cut.coordinates == {"cut": len(whole.tokens) - 160}
    assert cut.tokens.tolist() == whole.tokens[:80].tolist() + whole.tokens[-80:].tolist()


def test_lines_of_another_form_raise(tmp_path):
    (tmp_path / "passkey.jsonl").write_text(json.dumps({"context": ""}))
    with pytest.raises(ValueError, match="got a line without answer, input"):
        list(samples(source(infinitebench=tmp_path, parts=["passkey"]), LENGTH))


@pytest.mark.parametrize(
    ("part", "generated", "answers", "expected"),
    [
        ("passkey", " is 71432.", ("71432",), 1),
        ("passkey", " 7143 71432", ("71432",), 0),
        ("kv_retrieval", '"9f-a2",', ("9f-a2",), 1),
        ("kv_retrieval", "9f-a23", ("9f-a2",), 0),
        ("code_run", " the result is -4.", ("-4",), 1),
        ("code_run", " -4 or so", ("-4",), 0),
        ("code_debug", " B. g", ("g", "B"), 1),
        ("code_debug", "the answer is: g", ("g", "B"), 1),
        ("code_debug", "C. g", ("g", "B"), 0),
        ("math_find", " 2.0", ("2.0",), 1),
        ("math_find", " 12", ("2",), 0),
        ("math_calc", "[1, 3, 5]", ("1", "3", "4", "8"), 0.5),
        ("longbook_choice_eng", " B", ("Bo", "B"), 1),
        ("longbook_choice_eng", "I think the answer is B", ("Bo", "B"), 1),
        ("longbook_choice_eng", "Surely C then B", ("Bo", "B"), 0),
        ("longbook_choice_eng", "", ("Bo", "B"), 0),
        ("longdialogue_qa_eng", " Ace:", ("ACE",), 1),
        ("longbook_qa_eng", "The Ann of Lee", ("Bob", "Ann Lee"), 0.8),
        ("longbook_qa_chn", "安娜。", ("安娜",), 1),
    ],
)
def test_scores(part, generated, answers, expected):
    assert score(f"infinitebench/{part}", generated, answers) == pytest.approx(expected)


def test_every_part_has_a_prompt_with_its_context():
    assert all("{context}" in part.prompt for part in PARTS.values())


def test_summaries_are_scored_by_their_longest_common_lines():
    pytest.importorskip("rouge_score")
    answers = ("The cat sat.\nIt slept.", "Unlike it.")
    assert score("infinitebench/longbook_sum_eng", "the cat ran\nit slept", answers) == pytest.approx(0.8)


def test_summaries_need_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ImportError, match=r"pip install 'megatron-mtraining\[eval\]'"):
        score("infinitebench/longbook_sum_eng", "a", ("a",))
