"""``prepare_data``: documents to Megatron's ``.bin`` and ``.idx``, the longest first, some held out.

``python -m examples.extend_context.prepare_data FOLDER`` prints what ``--train-data-path`` takes of a prepared folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from megatron_mtraining.errors import invalid

from .progress import Progress
from .settings import Settings, Source
from .tokenizer import HuggingFaceTokenizer, Tokenizer
from .tokens import TokenisedSource, fingerprint, token_type, tokenise_source, write_atomically

REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class Division:
    """Documents of a source, by number, in the order in which they are written: the longest first."""

    train: numpy.ndarray
    held_out: numpy.ndarray
    repeated: numpy.ndarray
    """Documents that are neither: the same tokens are held out under another source."""

    beyond_max_tokens: numpy.ndarray
    """Documents that are neither: shorter than those that reach ``max_tokens``."""


def prepare_data(settings: Settings, tokenizer: Tokenizer | None = None) -> str:
    """Write the data sets of all sources and their report; return a sentence about them.

    Args:
        settings: of all commands.
        tokenizer: default: the tokenizer of the prepared model's folder.

    Raises:
        ValueError: a source without text, a tokenizer of another vocabulary, or a training sequence that is longer
            than any document.
    """
    tokenizer = tokenizer or HuggingFaceTokenizer(settings.model_folder)
    folder = settings.data_folder
    sources = settings.data.sources
    tokenised, identity = [], []
    for source in sources:
        shards = _shard_tokenizer(source)
        tokenised.append(tokenise_source(source, folder / "tokens" / source.name, tokenizer, shards))
        identity.append(fingerprint(source, tokenizer, shards))
    identity.append(json.dumps([asdict(settings.data), settings.train.seq_length], sort_keys=True))
    report_path = folder / REPORT
    report = json.loads(report_path.read_text()) if report_path.is_file() else {}
    if report.get("identity") != identity:
        divisions = divide(sources, tokenised, settings.data.held_out_share)
        check_lengths(tokenised, divisions, settings.train.seq_length)
        report_path.unlink(missing_ok=True)  # until all files are replaced
        report = _write(sources, tokenised, divisions, folder, token_type(tokenizer.vocab_size))
        write_atomically(report_path, json.dumps(report | {"identity": identity}, indent=1))
    print(histogram(report))
    return describe(report, folder)


def _shard_tokenizer(source: Source) -> Tokenizer | None:
    return None if source.tokenizer is None else HuggingFaceTokenizer(source.tokenizer)


def divide(sources: tuple[Source, ...], tokenised: list[TokenisedSource], held_out_share: float) -> list[Division]:
    """Divide the documents of all sources; a document with the tokens of a held-out one is never trained on."""
    bound = int(held_out_share * 2**64)
    held = []
    for source, tokens in zip(sources, tokenised, strict=True):
        everything = numpy.ones(len(tokens.hashes), dtype=bool)
        held.append(everything if source.held_out else numpy.asarray(tokens.hashes) < numpy.uint64(bound))
    held_hashes = numpy.unique(numpy.concatenate([t.hashes[h] for t, h in zip(tokenised, held, strict=True)]))
    divisions = []
    for source, tokens, chosen in zip(sources, tokenised, held, strict=True):
        repeated = ~chosen & numpy.isin(tokens.hashes, held_hashes)
        lengths = numpy.asarray(tokens.lengths)
        train = _longest_first(~chosen & ~repeated, lengths)
        taken = len(train)
        if source.max_tokens is not None:
            taken = int(numpy.searchsorted(numpy.cumsum(lengths[train]), source.max_tokens)) + 1
        held_out = _longest_first(chosen, lengths)
        divisions.append(Division(train[:taken], held_out, numpy.flatnonzero(repeated), train[taken:]))
    return divisions


def _longest_first(chosen: numpy.ndarray, lengths: numpy.ndarray) -> numpy.ndarray:
    documents = numpy.flatnonzero(chosen)
    return documents[numpy.argsort(-lengths[documents], kind="stable")]


def check_lengths(tokenised: list[TokenisedSource], divisions: list[Division], seq_length: int) -> None:
    """Raise where no document fills a training sequence.

    Raises:
        ValueError: the longest training document is shorter, or there is none.
    """
    longest = [int(t.lengths[d.train[0]]) for t, d in zip(tokenised, divisions, strict=True) if len(d.train)]
    if not longest:
        raise invalid("data.sources", "of documents to train on", "all of them held out")
    if max(longest) <= seq_length:
        remedy = "Join short texts with join: folder or all, give longer ones, or lower it."
        rule = f"below the {max(longest)} tokens of the longest training document"
        raise invalid("train.seq_length", rule, seq_length, remedy)


def _write(
    sources: tuple[Source, ...],
    tokenised: list[TokenisedSource],
    divisions: list[Division],
    folder: Path,
    dtype: numpy.dtype,
) -> dict[str, Any]:
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    pairs = zip(tokenised, divisions, strict=True)
    total = sum(int(t.lengths[part].sum()) for t, d in pairs for part in (d.train, d.held_out))
    progress = Progress("prepare_data: writing", total / 1e6, "M tokens")
    report: dict[str, Any] = {"sources": []}
    for source, tokens, division in zip(sources, tokenised, divisions, strict=True):
        entry: dict[str, Any] = {"name": source.name, "weight": source.weight, "chars": tokens.chars}
        for part in ("train", "held_out"):
            documents = getattr(division, part)
            lengths = numpy.asarray(tokens.lengths)[documents]
            if len(documents):
                _write_data_set(partial / f"{source.name}_{part}", tokens, documents, dtype, progress)
            entry[part] = _summary(lengths)
        for part in ("repeated", "beyond_max_tokens"):
            entry[part] = _summary(numpy.asarray(tokens.lengths)[getattr(division, part)])
        entry["empty_documents"] = tokens.empty_documents
        report["sources"].append(entry)
    progress.close()
    for path in sorted(partial.iterdir()):
        os.replace(path, folder / path.name)
    partial.rmdir()
    return report


def _write_data_set(
    prefix: Path, tokens: TokenisedSource, documents: numpy.ndarray, dtype: numpy.dtype, progress: Progress
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
    offsets = tokens.offsets
    try:
        for document in documents.tolist():
            length = int(tokens.lengths[document])
            builder.add_document(tokens.tokens[offsets[document] : offsets[document] + length], [length])
            progress.update(progress.done + length / 1e6)
        builder.finalize(f"{prefix}.idx")
    finally:
        builder.data_file.close()


def _summary(lengths: numpy.ndarray) -> dict[str, Any]:
    """Return documents, tokens, the longest, and both by powers of two of the length."""
    buckets: dict[str, list[int]] = {}
    powers = numpy.ceil(numpy.log2(numpy.maximum(lengths, 1))).astype(int)
    for power in sorted(set(powers.tolist())):
        chosen = lengths[powers == power]
        buckets[str(2**power)] = [len(chosen), int(chosen.sum())]
    longest = int(lengths.max()) if len(lengths) else 0
    return {"documents": len(lengths), "tokens": int(lengths.sum()), "longest": longest, "up_to": buckets}


def histogram(report: dict[str, Any]) -> str:
    """Return a table of documents and tokens by the documents' lengths."""
    totals: dict[int, list[int]] = {}
    for entry in report["sources"]:
        for column, part in ((0, "train"), (2, "held_out")):
            for power, (documents, tokens) in entry[part]["up_to"].items():
                row = totals.setdefault(int(power), [0, 0, 0, 0])
                row[column] += documents
                row[column + 1] += tokens
    lines = [f"{'up to':>10} {'documents':>10} {'tokens':>13} {'held out':>10} {'tokens':>13}"]
    lines += [f"{power:>10} {a:>10} {b:>13} {c:>10} {d:>13}" for power, (a, b, c, d) in sorted(totals.items())]
    return "\n".join(lines)


def describe(report: dict[str, Any], folder: Path) -> str:
    """Return the sentence that ``prepare_data`` ends with."""
    parts = []
    for entry in report["sources"]:
        train, held_out = entry["train"], entry["held_out"]
        text = f"{entry['name']}: {train['tokens']} tokens to train on, {held_out['tokens']} held out"
        unused = [f"{entry[part]['tokens']} {part.replace('_', ' ')}" for part in ("repeated", "beyond_max_tokens")]
        unused = [words for words in unused if not words.startswith("0 ")]
        parts.append(f"{text}, {', '.join(unused)}" if unused else text)
    return f"data in {folder}: {'; '.join(parts)}"


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report of the prepared data.

    Raises:
        ValueError: no data was prepared.
    """
    path = folder / REPORT
    if not path.is_file():
        raise invalid("data", "prepared", f"no {path}", "Run prepare_data first.")
    return json.loads(path.read_text())


def data_paths(folder: Path, part: str) -> list[str]:
    """Return weights and prefixes of the data sets of a part, ``train`` or ``held_out``, as for Megatron's flags.

    Raises:
        ValueError: no data was prepared.
    """
    paths = []
    for entry in read_report(folder)["sources"]:
        if entry[part]["documents"]:
            weight = entry["weight"] if part == "train" and entry["weight"] else None
            paths += [str(weight or entry[part]["tokens"]), str((folder / f"{entry['name']}_{part}").resolve())]
    return paths


if __name__ == "__main__":
    print(*data_paths(Path(sys.argv[1]), "train"))
