"""Readers of text: folders, .jsonl, parquet and the published form of ProLong, all with constant memory."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import re
import sysconfig
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_mtraining.errors import invalid

from .mds import read_samples
from .settings import Source

BLOCK_CHARS = 1 << 16
"""Characters that are tokenised at a time."""

_SEPARATOR = "\n\n"
"""Text between two files or records that are joined to one document."""

_ENDINGS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
}

_INSTALLED = ("site-packages", "dist-packages")
"""Folders below Python's library with other packages: no part of a source that has them within."""

Cursor = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A part of a document; neighbours of the same document follow each other."""

    document: Hashable
    """Identity of the document within its source."""

    text: str
    cursor: Cursor
    """Position of the reader from which reading again begins with this text, where it begins a document."""


def path_of(source: Source) -> Path:
    """Return the file or folder of a source.

    Raises:
        ValueError: ``python:NAME`` of a package that is not installed.
    """
    kind, _, rest = source.path.partition(":")
    if kind != "python":
        return Path(source.path)
    package, _, below = rest.partition("/")
    if package == "stdlib":
        return Path(sysconfig.get_path("stdlib"), below)
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise invalid(f"path of {source.name}", "of an installed package", source.path)
    return Path(spec.submodule_search_locations[0], below)


def form_of(source: Source) -> str:
    """Return the form of a source: the given one, or the one that its files' endings name.

    Raises:
        ValueError: no file there.
    """
    path = path_of(source)
    if not path.exists():
        raise invalid(f"path of {source.name}", "a file or a folder", source.path)
    if source.form is not None:
        return source.form
    if path.is_dir() and next(path.rglob("index.json"), None) is not None and next(path.rglob("*.mds*"), None):
        return "prolong"
    files = [path] if path.is_file() else _files(source, "*")
    for ending, form in _ENDINGS.items():
        if files and all(file.name.endswith(ending) for file in files):
            return form
    return "text"


def read_documents(source: Source, start: Cursor = (), *, decode: Callable[[Any], str] | None = None) -> Iterator[Text]:
    """Yield the texts of a source in the order of its files' names, from the cursor ``start`` on.

    Args:
        source: the source.
        start: cursor of a text that begins a document; default: the beginning.
        decode: text of token numbers, for ``prolong``.

    Raises:
        ValueError: no files, records without the field, or a ``join`` that the form does not have.
    """
    form = form_of(source)
    joins = {"text": ("folder", "all"), "prolong": ()}.get(form, ("all", "field:NAME"))
    if source.join is not None and re.sub(r"^field:.+", "field:NAME", source.join) not in joins:
        raise invalid(f"join of {source.name}", f"one of {', '.join(joins) or 'none'} for {form}", repr(source.join))
    if form == "text":
        return _read_files(source, start)
    if form == "prolong":
        if decode is None:
            raise invalid(f"tokenizer of {source.name}", "the tokenizer that the shards were made with", "nothing")
        return _read_prolong(source, start, decode)
    return _read_records(source, start, _jsonl_records if form == "jsonl" else _parquet_records)


def source_bytes(source: Source) -> int:
    """Return the bytes of all files of a source."""
    return sum(path.stat().st_size for path in _files(source))


def _files(source: Source, pattern: str | None = None) -> list[Path]:
    path = path_of(source)
    if path.is_file():
        return [path]
    found = path.rglob(pattern or source.pattern)
    installed = set(_INSTALLED) - set(path.parts)
    files = (
        file
        for file in found
        if file.is_file() and not file.name.startswith(".") and installed.isdisjoint(file.relative_to(path).parts)
    )
    return sorted(files, key=lambda file: (file.parent, file.name))  # a folder's own files beside each other


def _files_or_raise(source: Source) -> list[Path]:
    files = _files(source)
    if not files:
        raise invalid(f"path of {source.name}", f"of files that match {source.pattern}", f"none in {source.path}")
    return files


def _read_files(source: Source, start: Cursor) -> Iterator[Text]:
    files = _files_or_raise(source)
    before: Hashable = None
    for number in range(start[0] if start else 0, len(files)):
        path = files[number]
        document = {"folder": path.parent, "all": "all"}.get(source.join or "", number)
        blocks = _blocks(path)
        first = next(blocks, "")  # an empty file is an empty document
        yield Text(document, _SEPARATOR + first if document == before else first, (number,))
        yield from (Text(document, rest, (number,)) for rest in blocks)
        before = document


def _blocks(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        yield from cut_text(iter(lambda: file.read(BLOCK_CHARS), ""))


def cut_text(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the same text in parts of about ``BLOCK_CHARS``, cut where tokenizers begin anew: before a line's text."""
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) >= BLOCK_CHARS:
            cut = _last_cut(rest[:BLOCK_CHARS]) or _last_cut(rest)
            # A text without lines is cut somewhere in the end: memory has a bound, not the number of tokens.
            if not cut and len(rest) < 64 * BLOCK_CHARS:
                break
            cut = cut or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _last_cut(text: str) -> int:
    """Return the last position where a line that begins with a letter follows a line with text, 0 if there is none."""
    cut = len(text)
    while (cut := text.rfind("\n", 1, cut)) > 0:
        before = text[max(cut - 2, 0) : cut].removesuffix("\r")[-1:]
        if text[cut + 1 : cut + 2].isalpha() and not before.isspace():
            return cut + 1
    return 0


def _read_records(
    source: Source, start: Cursor, records: Callable[[Path, int, str], Iterator[tuple[dict[str, Any], int]]]
) -> Iterator[Text]:
    files = _files_or_raise(source)
    first, offset = start or (0, 0)
    field = (source.join or "").partition("field:")[2]
    before: Hashable = None
    for number in range(first, len(files)):
        for record, begin in records(files[number], offset if number == first else 0, source.name):
            text = record.get(source.text)
            if not isinstance(text, str):
                at = f"{files[number]} at {begin} with the fields {', '.join(map(str, record))}"
                raise invalid(f"text of {source.name}", "the field of a record that holds text", at)
            document: Hashable = (number, begin)
            if source.join == "all":
                document = "all"
            elif field:
                if field not in record:
                    raise invalid(f"join of {source.name}", "a field of every record", f"{files[number]} at {begin}")
                document = ("field", json.dumps(record[field], sort_keys=True, default=str))
            yield Text(document, _SEPARATOR + text if document == before else text, (number, begin))
            before = document


def _jsonl_records(path: Path, offset: int, name: str) -> Iterator[tuple[dict[str, Any], int]]:
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rb") as file:
        file.seek(offset)
        while True:
            begin = file.tell()
            line = file.readline()
            if not line:
                return
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise invalid(f"a line of {name}", "JSON", f"{path} at byte {begin}: {error}") from error
            if not isinstance(record, dict):
                raise invalid(f"a line of {name}", "a JSON object", f"{path} at byte {begin}")
            yield record, begin


def _parquet_records(path: Path, offset: int, name: str) -> Iterator[tuple[dict[str, Any], int]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise invalid("pyarrow", f"installed to read {name}", "nothing", "Run pip install pyarrow.") from error
    row = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64):
            if row + batch.num_rows <= offset:  # read, but not made into Python objects
                row += batch.num_rows
                continue
            for record in batch.to_pylist():
                if row >= offset:
                    yield record, row
                row += 1


def _read_prolong(source: Source, start: Cursor, decode: Callable[[Any], str]) -> Iterator[Text]:
    """Yield the documents of ProLong's shards: ``input_ids`` of several documents, cut at ``indices``."""
    first_sample, first_document = start or (0, 0)
    for number, sample in read_samples(path_of(source), first_sample):
        if "input_ids" not in sample:
            raise invalid(f"a sample of {source.name}", "with input_ids", f"sample {number} with {', '.join(sample)}")
        tokens = sample["input_ids"]
        bounds = sample.get("indices", [(0, len(tokens))])
        skipped = first_document if number == first_sample else 0
        for document, (begin, end) in itertools.islice(enumerate(bounds), skipped, None):
            yield Text((number, document), decode(tokens[int(begin) : int(end)]), (number, document))
