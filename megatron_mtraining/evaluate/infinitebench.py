"""InfiniteBench (Zhang et al., 2024): its published files where they are given, and its generated retrieval parts.

A published file is ``PART.jsonl`` with ``context``, ``input``, ``answer`` and ``options`` in each line. Prompts are
those of a model that completes texts. One longer than the length is cut in the middle, as the authors do, which ``cut``
of a sample's coordinates counts.
"""

from __future__ import annotations

import json
import re
import string
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import invalid
from .sample import Sample
from .source import Source

NAME = "infinitebench"

Score = Callable[[str, tuple[str, ...]], float]
"""Function of what was generated and of the answers; from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of InfiniteBench."""

    prompt: str
    """With the fields of a line in braces, and ``option_a`` to ``option_d``."""

    max_new_tokens: int
    score: Score


def samples(source: Source, length: int) -> Iterator[Sample]:
    """Yield the samples of each part: of its file where there is one, else generated.

    Raises:
        ValueError: a file is missing or has another form.
    """
    for name in [name for name in source.parts if name in PARTS] or GENERATED:
        if source.infinitebench is not None:
            lines = _published(source.infinitebench / f"{name}.jsonl", source.samples)
        elif name in GENERATED:
            lines = _generated(source, name, length)
        else:
            remedy = f"Give --infinitebench the folder of the published {name}.jsonl, or leave {name} out."
            raise invalid("--parts", f"some of {', '.join(GENERATED)} without --infinitebench", name, remedy)
        for number, line in enumerate(lines):
            yield _sample(source, name, length, number, line)


def _published(path: Path, count: int) -> Iterator[dict[str, object]]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:count]
        entries = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise invalid("--infinitebench", f"a folder with {path.name}", f"{path}: {error}") from None
    for entry in entries:
        missing = {"context", "input", "answer"} - set(entry if isinstance(entry, dict) else ())
        if missing:
            rule = f"a folder whose {path.name} has context, input and answer in each line"
            raise invalid("--infinitebench", rule, f"a line without {', '.join(sorted(missing))}")
    return iter(entries)


def _sample(source: Source, name: str, length: int, number: int, line: dict[str, object]) -> Sample:
    part = PARTS[name]
    before, after = source.around
    prompt = source.encode(part.prompt.format_map(_fields(line)))
    most = length - part.max_new_tokens - len(before) - len(after)
    if most < 2:
        raise invalid("--lengths", f"at least {length - most + 2} for {NAME}/{name}", length)
    cut = max(0, len(prompt) - most)
    if cut:
        prompt = np.concatenate([prompt[: most // 2], prompt[len(prompt) - (most - most // 2) :]])
    return Sample(
        benchmark=f"{NAME}/{name}",
        length=length,
        number=number,
        tokens=np.concatenate([before, prompt, after]),
        answers=_answers(line),
        max_new_tokens=part.max_new_tokens,
        coordinates={"cut": cut},
    )


class _fields(dict):
    """Fields of a prompt, from those of a line."""

    def __missing__(self, name: str) -> str:
        if name.startswith("option_"):
            return str(self["options"]["abcd".index(name[-1])])
        call = re.search(r"func_\d+\(-?\d+\)", self["input"])
        if name in ("func", "func_call") and call:
            return call[0].partition("(")[0] if name == "func" else call[0]
        raise KeyError(name)


def _answers(line: dict[str, object]) -> tuple[str, ...]:
    """Return the answers as texts; of a choice the text of the option, and its letter."""
    answer = line["answer"]
    answers = [str(each) for each in (answer if isinstance(answer, list) else [answer])]
    options = [str(each) for each in line.get("options") or ()]
    if options and len(answers) == 1:
        answers.append("ABCD"[options.index(answers[0])])
    return tuple(answers)


# Generated parts, in the form of a published line.


def _generated(source: Source, name: str, length: int) -> Iterator[dict[str, object]]:
    """Yield a line for each sample, as long as fits into ``length`` tokens."""
    room = length - PARTS[name].max_new_tokens - sum(map(len, source.around))
    for number in range(source.samples):
        state = source.rng(f"{NAME}/{name}", length, number)
        drawn = state.integers(0, 2**31), state.random()

        def line(size: int, drawn: tuple[int, float] = drawn) -> dict[str, object]:
            return GENERATED[name](np.random.default_rng(int(drawn[0])), size, drawn[1])

        def fits(size: int, line: Callable[[int], dict[str, object]] = line) -> bool:
            return len(source.encode(PARTS[name].prompt.format_map(_fields(line(size))))) <= room

        if not fits(1):
            raise invalid("--lengths", f"larger for {NAME}/{name}", length)
        low, high = 1, max(2, length // 4)
        while high - low > 1:  # the most lines that fit
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        yield line(low)


_GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def _noise_with(sentence: str, size: int, depth: float) -> str:
    """Return ``size`` lines of noise with a sentence among them."""
    before = int(depth * size)
    return "\n".join([*[_GRASS] * before, sentence, *[_GRASS] * (size - before)])


def _number(rng: np.random.Generator, digits: int) -> str:
    return "".join(map(str, rng.integers(0, 10, size=digits)))


def _passkey(rng: np.random.Generator, size: int, depth: float) -> dict[str, object]:
    key = str(rng.integers(10**4, 10**5))
    return {
        "context": _noise_with(f"The pass key is {key}. Remember it. {key} is the pass key.", size, depth),
        "input": "What is the pass key?",
        "answer": [key],
    }


def _number_string(rng: np.random.Generator, size: int, depth: float) -> dict[str, object]:
    value = "".join(str(digit) * 2 for digit in rng.permutation(10)[:5])
    return {
        "context": _noise_with(f"The sequence of digits is {value}. Remember it.", size, depth),
        "input": "What is the sequence of digits?",
        "answer": [value],
    }


def _kv_retrieval(rng: np.random.Generator, size: int, depth: float) -> dict[str, object]:
    pairs = [tuple(str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(2)) for _ in range(size)]
    key, value = pairs[int(depth * size)]
    return {
        "context": "JSON data:\n" + json.dumps(dict(pairs)),
        "input": f'Key: "{key}"\nThe value associated with the specified key is: ',
        "answer": [value],
    }


GENERATED = {"passkey": _passkey, "number_string": _number_string, "kv_retrieval": _kv_retrieval}
"""Parts that are generated without files, at every length."""


# Scores, as the authors define them.


def _first_integer(generated: str, answers: tuple[str, ...]) -> float:
    found = re.search(r"[0-9]+", generated)
    return float(found is not None and found[0] == answers[0])


def _among(generated: str, answers: tuple[str, ...]) -> float:
    return float(answers[0] in _without(generated, "\n:\"'.,?!{}").split())


def _name_among(generated: str, answers: tuple[str, ...]) -> float:
    return float(answers[0] in _without(generated, "\n:\"'.,?!{}").upper().split())


def _last_integer(generated: str, answers: tuple[str, ...]) -> float:
    found = _without(generated.strip(), "\n.`'\":").split()
    return float(bool(found) and re.fullmatch(r"[+-]?\d+", found[-1]) is not None and int(found[-1]) == int(answers[0]))


def _first_value(generated: str, answers: tuple[str, ...]) -> float:
    found = re.search(r"\d+\.\d+|\d+", generated)
    if found is None:
        return 0.0
    is_integer = re.fullmatch(r"[+-]?\d+", answers[0]) is not None
    return float((int(float(found[0])) if is_integer else float(found[0])) == float(answers[0]))


def _first_values(generated: str, answers: tuple[str, ...]) -> float:
    """Share of the answers before the first one that is wrong."""
    found = re.findall(r"[0-9]+", generated)
    equal = 0
    for value, answer in zip(found, answers, strict=False):
        if int(value) != int(answer):
            break
        equal += 1
    return equal / len(answers)


def _option(generated: str, answers: tuple[str, ...]) -> float:
    """Option by its letter, at the start or behind a phrase, or else the first letter that appears alone."""
    letter = answers[-1]
    if generated[:1] and generated[0] in "ABCD":
        return float(generated[0] == letter)
    text = " ".join(_without(generated, "\n\"'.,?!{}").split(" "))
    text = re.sub(" +", " ", text)
    for phrase in ("answer is:", "answer:", "answer is", "option is"):
        if phrase in text:
            return float(text.partition(phrase)[2][1:].startswith(letter))
    found = next((each for each in text.split() if each in "ABCD"), "")
    return float(found == letter)


def _function_option(generated: str, answers: tuple[str, ...]) -> float:
    """Option by its letter at the start, or by letter or name behind a phrase."""
    name, letter = answers
    if generated[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = _without(generated.strip(), "\n`'\"-*").replace("Option", " ").replace("option", " ")
    text = re.sub(" +", " ", text)
    for phrase in ("answer is:", "is:", "answer:"):
        if phrase in text:
            return float(text.partition(phrase)[2][1:].startswith((letter, name)))
    return 0.0


def _rouge(generated: str, answers: tuple[str, ...]) -> float:
    """ROUGE-Lsum, of the best answer.

    Raises:
        ImportError: the package that computes it is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        remedy = "Run: pip install 'megatron-mtraining[eval]'"
        raise ImportError(f"rouge-score must be installed for longbook_sum_eng. {remedy}") from None
    return RougeScorer(["rougeLsum"]).score_multi(answers, generated)["rougeLsum"].fmeasure


def _f1(found: list[str], expected: list[str]) -> float:
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected)) if common else 0.0


def _f1_english(generated: str, answers: tuple[str, ...]) -> float:
    def units(text: str) -> list[str]:
        return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split()

    return max(_f1(units(generated), units(answer)) for answer in answers)


def _f1_chinese(generated: str, answers: tuple[str, ...]) -> float:
    """A character is a unit."""

    def units(text: str) -> list[str]:
        return [each for each in text.lower() if not each.isspace() and each not in _PUNCTUATION]

    return max(_f1(units(generated), units(answer)) for answer in answers)


_PUNCTUATION = set(
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
    + "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _without(text: str, characters: str) -> str:
    """Return the text with a space for each of ``characters``."""
    return text.translate(str.maketrans(characters, " " * len(characters)))


_BOOK_QUESTION = "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
_OPTIONS = "A. {option_a}\nB. {option_b}\nC. {option_c}\nD. {option_d}\n\n"
_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it{more}. "
_HIDDEN += "I will quiz you about the important information there.\n\n{{context}}\n\n{{input}}\n\n{lead}"

PARTS = {
    "passkey": Part(_HIDDEN.format(more=" and memorize it", lead="The pass key is"), 6, _first_integer),
    "number_string": Part(_HIDDEN.format(more="", lead="The sequence of digits is"), 12, _first_integer),
    "kv_retrieval": Part(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        50,
        _among,
    ),
    "longbook_choice_eng": Part(
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n"
        + _OPTIONS
        + "The letter of the correct answer is",
        40,
        lambda generated, answers: _option(generated.lstrip(), answers),
    ),
    "longbook_qa_eng": Part(_BOOK_QUESTION + "Question: {input}\nAnswer:", 40, _f1_english),
    "longbook_qa_chn": Part("阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：", 40, _f1_chinese),
    "longbook_sum_eng": Part("Summarize the book below.\n\n{context}\n\nSummary:", 1200, _rouge),
    "longdialogue_qa_eng": Part(
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and '
        "you should try to guess who that character is.\n\n{context}\n\n"
        "The name that has been replaced with $$MASK$$ is likely",
        40,
        _name_among,
    ),
    "math_find": Part("{context}\n\n{input}", 3, _first_value),
    "math_calc": Part(
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:",
        1024,
        _first_values,
    ),
    "code_run": Part(
        "There is a function called {func} in the following Python code.\n\n{context}\n\n"
        "Please compute the exact value of {func_call}. The value of {func_call} is",
        5,
        _last_integer,
    ),
    "code_debug": Part(
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash.\n\n{context}\n\nOptions:\n" + _OPTIONS + "The correct option is:",
        5,
        lambda generated, answers: _function_option(generated.lstrip(), answers),
    ),
}
"""Parts by their published names."""


def score(name: str, generated: str, answers: tuple[str, ...]) -> float:
    """Return the score of a part, from 0 to 1."""
    return PARTS[name.partition("/")[2]].score(generated, answers)
