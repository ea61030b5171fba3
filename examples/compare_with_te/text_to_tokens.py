"""Bytes of text files as a data set of Megatron's: one token a byte, one document a file, each ended by token 256.

    python examples/compare_with_te/text_to_tokens.py FOLDER PREFIX

writes PREFIX.bin and PREFIX.idx; train on them with ``--data-path PREFIX
--tokenizer-type NullTokenizer --vocab-size 257``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

END_OF_DOCUMENT = 256


def write_tokens(folder: Path, prefix: Path) -> int:
    """Writes the data set of all files under ``folder``, in the order of their names; returns its number of tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    total = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        tokens = torch.tensor([*path.read_bytes(), END_OF_DOCUMENT], dtype=torch.int32)
        builder.add_document(tokens, [len(tokens)])
        total += len(tokens)
    builder.finalize(f"{prefix}.idx")
    return total


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of text files")
    parser.add_argument("prefix", type=Path, help="path of the data set, without .bin and .idx")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"folder must be a folder of text files, got {options.folder}.")
    options.prefix.parent.mkdir(parents=True, exist_ok=True)
    print(f"{write_tokens(options.folder, options.prefix)} tokens in {options.prefix}.bin")


if __name__ == "__main__":
    main()
