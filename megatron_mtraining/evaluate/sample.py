"""Samples: token numbers of a text and what is measured on it, and the files that hold them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..errors import invalid

SAMPLES, TOKENS = "samples.jsonl", "tokens.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One text for one model: a prompt whose answer is compared, or a text whose losses are measured."""

    benchmark: str
    """Name; a part of one has its own, ``infinitebench/passkey``."""

    length: int
    """Tokens that were asked for; the text and what is generated behind it are no longer, but for RULER's."""

    number: int
    """Position among the samples of this benchmark and length."""

    tokens: np.ndarray
    """int32."""

    answers: tuple[str, ...] = ()
    """Right answers; none where losses are measured."""

    max_new_tokens: int = 0
    """Tokens to generate; 0 where losses are measured."""

    coordinates: dict[str, float] = field(default_factory=dict)
    """Numbers of this sample, for instance the needle's depth."""

    def digest(self, *facts: str) -> str:
        """Return a key of this sample under ``facts``, the same in every run."""
        written = json.dumps([_as_dict(self), *facts], sort_keys=True)
        return hashlib.sha256(written.encode() + self.tokens.astype("<i4").tobytes()).hexdigest()[:16]


def _as_dict(sample: Sample) -> dict[str, object]:
    return {name: value for name, value in asdict(sample).items() if name != "tokens"}


def write_samples(folder: Path, samples: Iterable[Sample]) -> int:
    """Write ``samples.jsonl`` and ``tokens.npy``; return the number of samples."""
    lines, tokens = [], [np.empty(0, np.int32)]
    for sample in samples:
        lines.append(json.dumps(_as_dict(sample) | {"num_tokens": len(sample.tokens)}))
        tokens.append(sample.tokens)
    np.save(folder / TOKENS, np.concatenate(tokens))
    (folder / SAMPLES).write_text("\n".join(lines) + "\n")
    return len(lines)


def read_samples(folder: Path) -> list[Sample]:
    """Return what :func:`write_samples` wrote.

    Raises:
        ValueError: the folder holds something else.
    """
    samples, start = [], 0
    try:
        tokens = np.load(folder / TOKENS, mmap_mode="r")
        for line in (folder / SAMPLES).read_text().splitlines():
            entries = json.loads(line)
            stop = start + entries.pop("num_tokens")
            entries["answers"] = tuple(entries["answers"])
            samples.append(Sample(tokens=tokens[start:stop], **entries))
            start = stop
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid("--prepared", "a folder that --prepare wrote", f"{folder}: {error}") from None
    if start != len(tokens):
        raise invalid("--prepared", "a folder that --prepare wrote", f"{folder} with {len(tokens)} tokens for {start}")
    return samples


def check_samples(samples: Sequence[Sample], *, vocab_size: int) -> None:
    """Raise where a token is not in the model's vocabulary.

    Raises:
        ValueError: naming the benchmark.
    """
    for sample in samples:
        largest = int(sample.tokens.max())
        if largest >= vocab_size:
            rule = f"of tokens below {vocab_size}, the model's vocabulary"
            raise invalid(
                "--prepared", rule, f"{largest} in {sample.benchmark}", "Prepare with this model's tokenizer."
            )
