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

    def __init__(self, folder: str | Path) -> None:
        """Load the tokenizer of ``folder``.

        Args:
            folder: with ``tokenizer.json``; a config.json beside it gives the rows of the model's embedding.

        Raises:
            ValueError: no such tokenizer, or one of another vocabulary than the model's.
        """
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            remedy = "Save one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
            raise invalid("the tokenizer", "in its folder as tokenizer.json", f"no {path / 'tokenizer.json'}", remedy)
        try:
            from tokenizers import Tokenizer as FastTokenizer
        except ImportError as error:
            raise invalid("tokenizers", "installed", "nothing", "pip install tokenizers") from error
        # The file itself: transformers' classes may add tokens that the file does not have.
        self._fast = FastTokenizer.from_file(str(path / "tokenizer.json"))
        self._fast.encode_special_tokens = True
        self._fast.no_truncation()
        self._fast.no_padding()
        self.identity = hashlib.blake2b((path / "tokenizer.json").read_bytes()).hexdigest()[:16]
        num_tokens = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1
        self.vocab_size = _json(path / "config.json").get("vocab_size", num_tokens)
        check_vocabulary(num_tokens, self.vocab_size, str(path))
        self.end_of_document = self._end_token(path)

    def _end_token(self, path: Path) -> int:
        name = _json(path / "tokenizer_config.json").get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        number = self._fast.token_to_id(name) if isinstance(name, str) else None
        if number is None:
            number = _json(path / "config.json").get("eos_token_id")
            number = number[0] if isinstance(number, list) and number else number
        if not isinstance(number, int):
            raise invalid("the tokenizer", "of a vocabulary with an end-of-text token", f"none in {path}")
        return number

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Any) -> str:
        return self._fast.decode([int(token) for token in tokens], skip_special_tokens=True)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def check_vocabulary(num_tokens: int, vocab_size: int, name: str) -> None:
    """Raise for a tokenizer of another vocabulary than the model's.

    An embedding may have more rows than there are tokens, for padding: up to a twentieth.

    Raises:
        ValueError: a token without a row, or far more rows than tokens.
    """
    if not 0.95 * vocab_size <= num_tokens <= vocab_size:
        rule = f"of the model's vocabulary, {vocab_size} tokens"
        raise invalid("the tokenizer", rule, f"{num_tokens} tokens in {name}", "Take the model's own.")
