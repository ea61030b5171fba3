"""Source of samples: a tokenizer, a long text, and the draws of each sample."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import invalid

_MARKER = "mtraining-prompt"

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
"""Haystack without a text."""


@dataclass
class Source:
    """Texts and draws that benchmarks make samples of."""

    tokenizer: object
    """A tokenizer of transformers."""

    texts: Sequence[Path] = ()
    """Files whose texts follow each other; a ``.npy`` file has tokens."""

    samples: int = 4
    """Samples of each setting."""

    seed: int = 0
    chat: bool = False
    """True if prompts are in the tokenizer's chat template."""

    depths: int = 5
    """Depths of the needle, evenly spread from 0 to 1."""

    needles: int = 1
    """Needles in a haystack, one of which is asked for."""

    infinitebench: Path | None = None
    """Folder of InfiniteBench's published files."""

    ruler: Path | None = None
    """Folder of what lm-eval would download for RULER."""

    parts: Sequence[str] = ()
    """Parts of InfiniteBench and of RULER; of a benchmark without one, its default."""

    def rng(self, benchmark: str, length: int, number: int) -> np.random.Generator:
        """Return the draws of one sample, which depend on no other sample."""
        return np.random.default_rng([self.seed, zlib.crc32(benchmark.encode()), length, number])

    def encode(self, text: str) -> np.ndarray:
        """Return int32 tokens of a text, without special ones."""
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    @cached_property
    def first(self) -> np.ndarray:
        """Tokens that the tokenizer puts before a text: none, or one that marks the beginning."""
        begin = getattr(self.tokenizer, "bos_token_id", None)
        ids = self.tokenizer("a")["input_ids"]
        return np.array(ids[:1] if begin is not None and ids[:1] == [begin] else [], np.int32)

    @cached_property
    def around(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens before and after a prompt.

        Raises:
            ValueError: the chat template is asked for, and there is none.
        """
        if not self.chat:
            return self.first, np.empty(0, np.int32)
        if not getattr(self.tokenizer, "chat_template", None):
            raise invalid("--chat", "left out for a tokenizer without a chat template", "it")
        message = [{"role": "user", "content": _MARKER}]
        before, after = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split(
            _MARKER
        )
        return self.encode(before), self.encode(after)

    @cached_property
    def text(self) -> np.ndarray:
        """Tokens of all texts.

        Raises:
            ValueError: a file cannot be read.
        """
        return np.concatenate([np.empty(0, np.int32), *map(self._read, self.texts)])

    def _read(self, path: Path) -> np.ndarray:
        try:
            if path.suffix != ".npy":
                return self.encode(path.read_text(encoding="utf-8", errors="replace"))
            tokens = np.load(path)
        except (OSError, ValueError) as error:
            raise invalid("--text", "a file that can be read", f"{path}: {error}") from None
        if tokens.dtype.kind not in "iu":
            raise invalid("--text", "of tokens or a text", f"{path}: {tokens.dtype}")
        return tokens.reshape(-1).astype(np.int32)

    def cut(self, benchmark: str, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return ``count`` tokens that follow each other in the text, from a drawn one on.

        Raises:
            ValueError: the text is shorter.
        """
        if not self.texts:
            raise invalid(
                "--text", f"given for {benchmark}", "nothing", "Give a text that the model was not trained on."
            )
        if len(self.text) < count:
            got = f"{len(self.text)} tokens in {', '.join(path.name for path in self.texts)}"
            raise invalid("--text", f"of at least {count} tokens for {benchmark}", got, "Give longer texts.")
        start = int(rng.integers(0, len(self.text) - count + 1))
        return self.text[start : start + count]

    def haystack(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return ``count`` tokens of the text, or of NOISE; a shorter text repeats."""
        text = self.text if self.texts else self.encode(NOISE)
        if len(text) > count:
            start = int(rng.integers(0, len(text) - count + 1))
            return text[start : start + count]
        return np.resize(text, count)

    def sentence_end(self, tokens: np.ndarray, position: int) -> int:
        """Return the last position up to ``position`` at which a sentence or line ends; 0 without one."""
        for stop in range(position, 0, -1):
            if self.tokenizer.decode([int(tokens[stop - 1])]).rstrip(" ").endswith((".", "!", "?", "\n")):
                return stop
        return 0
