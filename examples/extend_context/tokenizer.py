"""The model's tokenizer, as data preparation uses it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_mtraining.errors import invalid


class Tokenizer(Protocol):
    """Numbers of a text's tokens."""

    vocab_size: int
    """Rows of the model's embedding; every token number is below it."""

    end_of_document: int
    """Token that ends each document."""

    identity: str
    """Text that differs between tokenizers that give different numbers."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of each text, without special tokens around it."""

    def decode(self, tokens: Any) -> str:
        """Return the text of token numbers, without its special tokens."""


class HuggingFaceTokenizer:
    """Tokenizer of a Hugging Face folder; a special token's name in a text is plain text."""

    def __init__(self, folder: str | Path, *, vocab_size: int | None = None) -> None:
        """Load the tokenizer of ``folder``.

        Args:
            folder: with ``tokenizer.json``.
            vocab_size: rows of the model's embedding; default: that of the folder's config.json.

        Raises:
            ValueError: no such tokenizer, or one of another vocabulary than the model's.
        """
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            remedy = "Save one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
            raise invalid("the tokenizer", "in its folder as tokenizer.json", f"no {path / 'tokenizer.json'}", remedy)
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise invalid("transformers", "installed", "nothing", "pip install 'megatron-mtraining[bridge]'") from error
        tokenizer = AutoTokenizer.from_pretrained(path)
        self._fast = tokenizer.backend_tokenizer
        self._fast.encode_special_tokens = True
        self._decode = tokenizer.decode
        self.identity = hashlib.blake2b((path / "tokenizer.json").read_bytes()).hexdigest()[:16]
        if vocab_size is None:
            vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        self.vocab_size = vocab_size
        end = tokenizer.eos_token_id
        if end is None:
            raise invalid("the tokenizer", "of a vocabulary with an end-of-text token", f"none in {path}")
        self.end_of_document = int(end)
        check_vocabulary(max(tokenizer.get_vocab().values()) + 1, vocab_size, str(path))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Any) -> str:
        return self._decode([int(token) for token in tokens], skip_special_tokens=True)


def check_vocabulary(num_tokens: int, vocab_size: int, name: str) -> None:
    """Raise for a tokenizer of another vocabulary than the model's.

    An embedding may have more rows than there are tokens, for padding: up to a twentieth.

    Raises:
        ValueError: a token without a row, or far more rows than tokens.
    """
    if not 0.95 * vocab_size <= num_tokens <= vocab_size:
        rule = f"of the model's vocabulary, {vocab_size} tokens"
        raise invalid("the tokenizer", rule, f"{num_tokens} tokens in {name}", "Take the model's own.")
