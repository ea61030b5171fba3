"""RULER (Hsieh et al., 2024) as lm-eval has it: its tasks, prompts and score; this package's attention and samples.

A sample is the one that lm-eval draws, with its default seeds, for that task, length and number alone.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np

from ..errors import InvalidError, invalid
from .sample import Sample
from .source import Source

NAME = "ruler"

GENERATED = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""Tasks that need nothing."""

ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
"""Tasks whose haystack is a text: Paul Graham's essays, as published."""

QUESTIONS = {"ruler_qa_squad": "dev-v2.0.json", "ruler_qa_hotpot": "hotpot_dev_distractor_v1.json"}
"""Tasks with questions of a published file."""

PARTS = (*GENERATED, *ESSAYS, *QUESTIONS)

_MODULES = ("prepare_niah", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils")
"""Modules that draw samples, in a loop under ``tqdm``."""

_NUMPY_SEED = 1234
"""lm-eval's, beside 0 for Python's draws."""


def samples(source: Source, length: int) -> Iterator[Sample]:
    """Yield the samples of each task; without ``--parts``, of every task that can run, and print which cannot.

    A prompt may be some tokens longer than ``length``, by the beginning of its answer: lm-eval does not count that.

    Raises:
        ValueError: lm-eval or what a task needs is missing, or no sample fits into the length.
    """
    if source.chat:
        raise InvalidError("unsupported: --chat with ruler, whose answers begin in the prompt. Leave one out.")
    obstacles = {name: _obstacle(source, name) for name in PARTS}
    asked = [name for name in source.parts if name in PARTS]
    for name in asked:
        if obstacles[name]:
            raise invalid("--parts", "tasks whose texts are given", name, obstacles[name])
    for name in asked or [name for name in PARTS if not obstacles[name]]:
        yield from _samples_of_task(source, name, length)
    left_out = [f"{name}: {why}" for name, why in obstacles.items() if why]
    if left_out and not asked:
        print(f"RULER runs {len(PARTS) - len(left_out)} of {len(PARTS)} tasks. " + " ".join(left_out), file=sys.stderr)


def _obstacle(source: Source, name: str) -> str:
    """Return what to give a task that cannot run; empty where it can."""
    if name in ESSAYS and not source.texts:
        return "Give --text."
    if name in QUESTIONS and not (source.ruler and (source.ruler / QUESTIONS[name]).is_file()):
        return f"Give --ruler a folder with {QUESTIONS[name]}."
    return ""


def _samples_of_task(source: Source, name: str, length: int) -> Iterator[Sample]:
    try:
        lm_eval = import_module("lm_eval")
        manager = import_module("lm_eval.tasks").TaskManager(
            include_path=str(Path(lm_eval.__file__).parent / "tasks" / "ruler"),
            include_defaults=False,
            metadata={"max_seq_lengths": [length], "tokenizer": source.tokenizer.name_or_path},
        )
        with _drawing(source):
            (task,) = manager.load([name])["tasks"].values()
            task.build_all_requests(limit=source.samples, rank=0, world_size=1)
    except ImportError as error:
        remedy = "Run: pip install 'megatron-mtraining[eval]'"
        raise invalid("lm-eval", "installed for ruler, with what its tasks need", str(error), remedy) from None
    except (ValueError, RuntimeError) as error:
        raise invalid("--lengths", f"such that lm-eval makes samples of {name}", f"{length}: {error}") from None
    for number, request in enumerate(task.instances):
        context, options = request.args
        yield Sample(
            benchmark=f"{NAME}/{name}",
            length=length,
            number=number,
            tokens=np.array(source.tokenizer(context, verbose=False)["input_ids"], np.int32),
            answers=tuple(request.doc["outputs"]),
            max_new_tokens=options["max_gen_toks"],
        )


@contextmanager
def _drawing(source: Source) -> Iterator[None]:
    """Seed what lm-eval draws from, end its loops after the samples that are asked for, and give it local texts."""
    modules = {name: import_module(f"lm_eval.tasks.ruler.{name}") for name in (*_MODULES, "niah_utils")}
    words = modules["cwe_utils"].RNG  # its own draws, which would go on from task to task
    if not hasattr(words, "first_state"):
        words.first_state = words.getstate()
    states = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        for name in _MODULES:
            change = patch.object(modules[name], "tqdm", lambda numbers, **_: islice(numbers, source.samples))
            stack.enter_context(change)
        if source.texts:
            haystack = _haystack(source, modules["niah_utils"].get_haystack)
            stack.enter_context(patch.object(modules["niah_utils"], "get_haystack", haystack))
            if not _has_sentence_splitter():
                stack.enter_context(patch.object(modules["prepare_niah"], "sent_tokenize", _sentences))
            modules["prepare_niah"].cached_sent_tokenize.cache_clear()
        if source.ruler:
            stack.enter_context(patch.object(modules["qa_utils"], "download_json", _reader(source.ruler)))
            modules["qa_utils"].read_squad.cache_clear()
            modules["qa_utils"].read_hotpotqa.cache_clear()
        random.seed(source.seed)
        np.random.seed(_NUMPY_SEED + source.seed)
        words.setstate(words.first_state)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _haystack(source: Source, original: Callable[[str], object]) -> Callable[[str], object]:
    def get(type_haystack: str) -> object:
        return source.decode(source.text).split() if type_haystack == "essay" else original(type_haystack)

    return get


def _has_sentence_splitter() -> bool:
    try:
        import_module("nltk").data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True


def _sentences(text: str) -> list[str]:
    """Split at ends of sentences, where nltk has no data for it."""
    return re.split(r"(?<=[.!?])\s+", text)


def _reader(folder: Path) -> Callable[[str], object]:
    def read(url: str) -> object:
        path = folder / url.rpartition("/")[2]
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise invalid("--ruler", f"a folder with a readable {path.name}", f"{path}: {error}") from None

    return read


def score(generated: str, answers: tuple[str, ...]) -> float:
    """Return the share of the answers that the text contains, whatever their case."""
    text = generated.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)
