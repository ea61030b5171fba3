"""RULER (Hsieh et al., 2024) by lm-eval, whose code makes the prompts and scores the answers.

The samples of a part and length are the first documents that ``lm-eval run --tasks PART`` has with this length and its
default seeds. lm-eval downloads essays, rules for sentences and two sets of questions. With a folder nothing is
downloaded: its ``*.txt`` are the essays, ``tokenizers/punkt_tab`` the rules of nltk, and the questions are in the files
of the names that lm-eval downloads.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np

from ..errors import InvalidError, invalid
from .sample import Sample
from .source import Source

NAME = "ruler"

PARTS = {
    **{
        f"niah_{each}": ("niah_utils", f"niah_{each}")
        for each in "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multiquery multivalue".split()
    },
    "ruler_vt": ("vt_utils", "get_vt_dataset"),
    "ruler_cwe": ("cwe_utils", "get_cw_dataset"),
    "ruler_fwe": ("fwe_utils", "fwe_download"),
    "ruler_qa_squad": ("qa_utils", "get_squad"),
    "ruler_qa_hotpot": ("qa_utils", "get_hotpotqa"),
}
"""Parts by lm-eval's names: the module of the function that makes the documents, and its name."""

_PACKAGE = "lm_eval.tasks.ruler"
_ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
_NUMPY_SEED = 1234
"""lm-eval's default, beside 0 for Python's draws."""


def samples(source: Source, length: int) -> Iterator[Sample]:
    """Yield the samples of each part; one of all whose data cannot be had is skipped, which is printed.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: a length is too small, or the data of a part that was asked for by name cannot be had.
    """
    _import_module("lm_eval")
    parts = [name for name in source.parts if name in PARTS]
    for name in parts or PARTS:
        print(f"{NAME}/{name}, {length}: prompts", file=sys.stderr)
        try:
            yield from _samples(source, name, length)
        except (OSError, LookupError) as error:  # nltk's without its rules is a LookupError
            if isinstance(error, (KeyError, IndexError)):
                raise
            reason = " ".join(str(error).split())[:300]
            if parts:
                remedy = "Give --ruler a folder with the data, or name other parts in --parts."
                raise invalid("--parts", f"without {name}", f"it, whose data cannot be had: {reason}", remedy) from None
            print(f"{NAME}/{name}, {length}: skipped, its data cannot be had: {reason}", file=sys.stderr)


def score(sample: Sample, generated: str) -> float:
    """Return lm-eval's score of an answer.

    Raises:
        ImportError: lm-eval is not installed.
    """
    common = _import_module(f"{_PACKAGE}.common_utils")
    process = common.process_results_part if "_qa_" in sample.benchmark else common.process_results
    document = {"max_length": sample.length, "outputs": list(sample.answers)}
    return float(process(document, [generated])[str(sample.length)])


def _samples(source: Source, name: str, length: int) -> Iterator[Sample]:
    tokenizer = source.tokenizer

    def chat_template(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    before = source.around[0][:0] if source.chat else source.first  # a template has its own
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if source.ruler is not None:  # lm-eval asks for the rules in any case
            stack.enter_context(mock.patch.object(_import_module("nltk"), "download", lambda *_, **__: False))
        manager = vars(_import_module("lm_eval.tasks"))["TaskManager"](
            include_defaults=False,
            include_path=str(Path(_import_module("lm_eval").__file__).parent / "tasks" / "ruler"),
            metadata={"tokenizer": tokenizer.name_or_path, "max_seq_lengths": [length]},
        )
        changed = {"task": name, "custom_dataset": lambda **options: _documents(source, name, length, options)}
        part = manager.load({"group": NAME, "task": [changed]})["tasks"][name]
        part.build_all_requests(limit=source.samples, apply_chat_template=source.chat, chat_template=chat_template)
    for number, request in enumerate(part.instances):
        prompt, options = request.args
        yield Sample(
            benchmark=f"{NAME}/{name}",
            length=length,
            number=number,
            tokens=np.concatenate([before, source.encode(prompt)]),
            answers=tuple(request.doc["outputs"]),
            max_new_tokens=options["max_gen_toks"],
        )


def _documents(source: Source, name: str, length: int, options: dict[str, object]) -> object:
    """Return lm-eval's data set of a part, of ``source.samples`` documents instead of 500.

    The part's module is imported anew, since one draws from a generator of its own, which earlier lengths would move,
    and so would the check. That of needles draws from none, and its import takes 10 s and more.
    """
    _check_room(_import_module(f"{_PACKAGE}.{PARTS[name][0]}"), source.encode, name, length)
    sys.modules.pop(f"{_PACKAGE}.{PARTS[name][0]}", None)
    module, prepare = (_import_module(f"{_PACKAGE}.{each}") for each in (PARTS[name][0], "prepare_niah"))
    with contextlib.ExitStack() as stack:

        def replace(of: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(of, name, value))

        for each in (prepare, module):  # their loops over documents; niah_utils has none
            if hasattr(each, "tqdm"):
                replace(each, "tqdm", lambda numbers, **_: itertools.islice(numbers, source.samples))
        if source.ruler is not None and name in _ESSAYS:
            prepare.get_haystack.cache_clear()
            replace(prepare, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: {"text": _essays(source.ruler)}))
            if not _has_sentence_rules(source.ruler):
                replace(prepare, "cached_sent_tokenize", lambda text: re.split(r"(?<=[.!?])\s+", text))
        if source.ruler is not None and hasattr(module, "download_json"):
            replace(module, "download_json", lambda url: _read_questions(source.ruler / url.rpartition("/")[2]))
        if source.ruler is None and name in _ESSAYS:
            replace(prepare, "datasets", SimpleNamespace(load_dataset=_downloading(prepare.datasets.load_dataset)))
        if source.ruler is None and hasattr(module, "download_json"):
            replace(module, "download_json", _downloading(module.download_json))
        random.seed(source.seed)
        np.random.seed(_NUMPY_SEED + source.seed)
        try:
            return vars(module)[PARTS[name][1]](**options)
        except InvalidError:
            raise
        except ValueError as error:
            raise invalid("--lengths", f"larger for {NAME}/{name}", f"{length}: {error}") from None


def _downloading(download: Callable[..., object]) -> Callable[..., object]:
    """Return ``download`` with an OSError for its ValueError, which ``datasets`` raises offline."""

    def downloading(*args: object, **options: object) -> object:
        try:
            return download(*args, **options)
        except ValueError as error:
            raise OSError(str(error)) from error

    return downloading


def _essays(folder: Path) -> list[str]:
    essays = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.txt"))]
    if not essays:
        raise FileNotFoundError(f"no essays, *.txt, in {folder}")
    return essays


def _read_questions(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise invalid("--ruler", f"a folder whose {path.name} is the published file", f"another: {error}") from None


def _has_sentence_rules(folder: Path) -> bool:
    nltk = _import_module("nltk")
    if str(folder) not in nltk.data.path:
        nltk.data.path.append(str(folder))
    try:
        return bool(nltk.data.find("tokenizers/punkt_tab"))
    except LookupError:
        print(
            f"{NAME}: sentences of the essays end at . ! ?: {folder}/tokenizers/punkt_tab is missing", file=sys.stderr
        )
        return False


def _check_room(module: ModuleType, encode: Callable[[str], np.ndarray], name: str, length: int) -> None:
    """Raise where lm-eval would draw forever: prompts of these parts are drawn until one fits, and none does.

    Prompts of the least size are measured, with a twentieth added for those of other draws.
    """

    def least(*texts: str) -> int:
        return int(1.05 * sum(len(encode(text)) for text in texts))

    if name == "ruler_vt":  # an example of 5 sentences has at most 500 tokens, a prompt has 10
        example, answer = module.generate_input_output(5, 1, 4, is_icl=True)
        if (room := least(example, str(answer)) + 30) > 500:
            raise invalid("the tokenizer", f"one that writes the example of {NAME}/{name} in 500 tokens", room)
        prompt, answer = module.generate_input_output(10, 1, 4)
        room = least(prompt, str(answer)) + 30 + 500
    elif name == "ruler_cwe":
        example, prompt, answer = module.generate_input_output(10, length)
        room = least(example, prompt, *(f"{i}. {each} " for i, each in enumerate(answer))) + 120
    elif name == "ruler_fwe":
        room = max(least(module.TEMPLATE), 200)  # a vocabulary of length / 50, with noise and three answers
    else:
        return
    if room > length:
        raise invalid("--lengths", f"at least {room} for {NAME}/{name} with this tokenizer", length)


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedy = "Run: pip install 'megatron-mtraining[eval]'"
        raise ImportError(f"lm-eval must be installed for {NAME}, with its extra ruler: {error}. {remedy}") from None
