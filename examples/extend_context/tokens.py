"""Tokens of a source, written one document after the other; a stopped run continues behind its last whole document.

``tokens.bin`` holds the numbers, ``lengths.bin`` (int64) and ``hashes.bin`` (uint64) a number for each document.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from megatron_mtraining.errors import invalid

from .documents import BLOCK_CHARS, Cursor, Text, cut_text, read_documents, source_bytes
from .progress import Progress
from .settings import Source
from .tokenizer import Tokenizer

_BATCH_CHARS = 64 * BLOCK_CHARS
_SECONDS_BETWEEN_STATES = 5.0


@dataclass(slots=True)
class State:
    """Position of a run: everything before it is in the files."""

    fingerprint: str
    cursor: Cursor = ()
    documents: int = 0
    tokens: int = 0
    chars: int = 0
    empty_documents: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class TokenisedSource:
    """Tokens of a source, memory-mapped."""

    tokens: numpy.ndarray
    lengths: numpy.ndarray
    """int64 ``[documents]``: tokens of each document, its end token included."""

    hashes: numpy.ndarray
    """uint64 ``[documents]``: hash of each document's tokens."""

    empty_documents: int
    chars: int

    @property
    def offsets(self) -> numpy.ndarray:
        """int64 ``[documents]``: position of each document's first token."""
        return numpy.cumsum(self.lengths) - self.lengths


def token_type(vocab_size: int) -> numpy.dtype:
    """Return the element type that Megatron's data sets have for a vocabulary."""
    return numpy.dtype(numpy.uint16 if vocab_size < 65500 else numpy.int32)


def fingerprint(source: Source, tokenizer: Tokenizer, shard_tokenizer: Tokenizer | None) -> str:
    """Return a text that differs where the tokens of a source would."""
    read = ("path", "form", "pattern", "join", "text")
    identities = [tokenizer.identity, tokenizer.end_of_document, shard_tokenizer.identity if shard_tokenizer else ""]
    content = [*(getattr(source, name) for name in read), *identities]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def tokenise_source(
    source: Source,
    folder: Path,
    tokenizer: Tokenizer,
    shard_tokenizer: Tokenizer | None = None,
    *,
    seconds_between_states: float = _SECONDS_BETWEEN_STATES,
) -> TokenisedSource:
    """Write the tokens of a source to ``folder``, or what is missing of them, and map them.

    Raises:
        ValueError: a source without text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = _read_state(folder, fingerprint(source, tokenizer, shard_tokenizer))
    if not state.finished:
        texts = read_documents(source, state.cursor, decode=shard_tokenizer.decode if shard_tokenizer else None)
        progress = Progress(f"prepare_data: {source.name}", source_bytes(source) / 1e6, "MB", start=state.chars / 1e6)
        with _Writer(folder, state, token_type(tokenizer.vocab_size)) as writer:
            _tokenise(texts, writer, tokenizer, progress, seconds_between_states)
        progress.close()
    if not state.documents:
        raise invalid(f"path of {source.name}", "of text", f"{state.empty_documents} empty documents in {source.path}")
    return TokenisedSource(
        numpy.memmap(folder / "tokens.bin", dtype=token_type(tokenizer.vocab_size), mode="r"),
        numpy.memmap(folder / "lengths.bin", dtype=numpy.int64, mode="r"),
        numpy.memmap(folder / "hashes.bin", dtype=numpy.uint64, mode="r"),
        state.empty_documents,
        state.chars,
    )


def _tokenise(
    texts: Iterator[Text], writer: _Writer, tokenizer: Tokenizer, progress: Progress, seconds_between_states: float
) -> None:
    saved = time.monotonic()
    for batch in _batches(texts):
        for text, tokens in zip(batch, tokenizer.encode([text.text for text in batch]), strict=True):
            writer.add(text, tokens, tokenizer.end_of_document)
        progress.update(writer.chars / 1e6, f"{writer.state.documents} documents")
        if time.monotonic() - saved >= seconds_between_states:
            writer.save()
            saved = time.monotonic()
    writer.end_document(tokenizer.end_of_document)
    writer.state.finished = True
    writer.save()


def _batches(texts: Iterator[Text]) -> Iterator[list[Text]]:
    """Yield lists of some million characters, with long texts cut in parts."""
    batch, chars = [], 0
    for text in texts:
        # ``or``: an empty document stays one, to be counted.
        for part in [*cut_text([text.text])] or [""]:
            batch.append(Text(text.document, part, text.cursor))
            chars += len(part)
            if chars >= _BATCH_CHARS or len(batch) >= 4096:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


class _Writer:
    """Files of a source, and the state that goes with them."""

    def __init__(self, folder: Path, state: State, dtype: numpy.dtype) -> None:
        self.state, self.chars = state, state.chars
        self._folder, self._dtype = folder, dtype
        sizes = {"tokens": state.tokens * dtype.itemsize, "lengths": state.documents * 8, "hashes": state.documents * 8}
        self._files = {name: _file_of_size(folder / f"{name}.bin", size) for name, size in sizes.items()}
        self._document: Any = None
        self._length, self._num_chars, self._hash, self._cursor = 0, 0, hashlib.blake2b(digest_size=8), state.cursor
        self._is_begun = False

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, text: Text, tokens: list[int], end_token: int) -> None:
        """Write the tokens of a text, after the end of the document before it where it begins another."""
        if self._is_begun and text.document != self._document:
            self.end_document(end_token)
        if not self._is_begun:
            self._is_begun, self._document, self.state.cursor = True, text.document, text.cursor
        self._write(tokens)
        self.chars += len(text.text)

    def end_document(self, end_token: int) -> None:
        """End the document that is begun, and count it; one without tokens is counted as empty only."""
        if not self._is_begun:
            return
        if self._length:
            self._write([end_token])
            self._files["lengths"].write(numpy.int64(self._length).tobytes())
            self._files["hashes"].write(self._hash.digest())
            self.state.documents += 1
            self.state.tokens += self._length
        else:
            self.state.empty_documents += 1
        self.state.chars = self.chars
        self._is_begun, self._length, self._hash = False, 0, hashlib.blake2b(digest_size=8)

    def _write(self, tokens: list[int]) -> None:
        content = numpy.asarray(tokens, dtype=self._dtype).tobytes()
        self._files["tokens"].write(content)
        self._hash.update(content)
        self._length += len(tokens)

    def save(self) -> None:
        """Put files on the disk, then the state that counts whole documents only."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        write_atomically(self._folder / "state.json", json.dumps(asdict(self.state)))


def _file_of_size(path: Path, size: int) -> BinaryIO:
    path.touch()
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


def _read_state(folder: Path, expected: str) -> State:
    """Return the state of an earlier run, or a new one where it read another source or with another tokenizer."""
    path = folder / "state.json"
    if path.is_file():
        state = State(**json.loads(path.read_text()))
        state.cursor = tuple(state.cursor)
        if state.fingerprint == expected:
            return state
    return State(expected)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is whole or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)
