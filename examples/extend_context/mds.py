"""Samples of MosaicML's shards (``index.json`` and ``.mds``, also zstd): the form in which ProLong is published.

A shard holds ``uint32`` number of samples, ``uint32`` offsets of the samples and of the end, a header, and the samples:
``uint32`` size of each column that has no fixed one, and the columns' bytes. ``index.json`` names shards and columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from megatron_mtraining.errors import invalid

_SHAPE_TYPES = {0: "<u1", 1: "<u2", 2: "<u4", 3: "<u8"}
_VALUE_TYPES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
"""Codes of element types in a column ``ndarray``."""

_SCALARS = {
    "int": "<i8",
    **{f"{kind}{bits}": f"<{kind[0]}{bits // 8}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}


def read_samples(folder: Path, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and columns of the samples of all shards under ``folder``, from sample ``start`` on.

    Raises:
        ValueError: a folder without such shards, or a column of a form that is not read.
    """
    indices = sorted(folder.rglob("index.json"))
    if not indices:
        raise invalid("a folder of ProLong's form", "with index.json and .mds shards", str(folder))
    number = 0
    for index in indices:
        for shard in json.loads(index.read_text())["shards"]:
            samples = int(shard["samples"])
            if shard.get("format") != "mds" or shard.get("version") != 2:
                form = f"{shard.get('format')}, version {shard.get('version')} in {index}"
                raise invalid("format of a shard", "mds, version 2", form)
            if number + samples > start:
                yield from _shard_samples(index.parent, shard, number, max(start - number, 0))
            number += samples


def _shard_samples(folder: Path, shard: dict[str, Any], base: int, skipped: int) -> Iterator[tuple[int, dict]]:
    raw = folder / shard["raw_data"]["basename"]
    if raw.is_file():
        data: Any = numpy.memmap(raw, dtype=numpy.uint8, mode="r")
    else:
        data = numpy.frombuffer(_decompressed(folder, shard), dtype=numpy.uint8)
    num_samples = int(data[:4].view("<u4")[0])
    offsets = data[4 : 4 * (num_samples + 2)].view("<u4")
    if num_samples != shard["samples"] or int(offsets[-1]) != len(data):
        found = f"{num_samples} samples in {len(data)} bytes in {raw}"
        raise invalid(
            "a shard", f"of {shard['samples']} samples and whole, as index.json says", found, "Download anew."
        )
    for sample in range(skipped, num_samples):
        content = data[int(offsets[sample]) : int(offsets[sample + 1])].tobytes()
        yield base + sample, _columns(content, shard)


def _decompressed(folder: Path, shard: dict[str, Any]) -> bytes:
    packed = shard.get("zip_data") or {}
    path = folder / packed.get("basename", shard["raw_data"]["basename"])
    if not path.is_file():
        raise invalid("a shard of index.json", "in its folder", f"no {path}", "Download it.")
    if not str(shard.get("compression", "")).startswith("zstd"):
        raise invalid("compression of a shard", "zstd or none", f"{shard.get('compression')} in {folder}")
    try:
        import zstandard
    except ImportError as error:
        raise invalid("zstandard", f"installed to read {path}", "nothing", "pip install zstandard.") from error
    return zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=shard["raw_data"]["bytes"])


def _columns(content: bytes, shard: dict[str, Any]) -> dict[str, Any]:
    position, sizes = 0, []
    for size in shard["column_sizes"]:
        if size is None:
            size = int.from_bytes(content[position : position + 4], "little")
            position += 4
        sizes.append(size)
    columns = {}
    for name, encoding, size in zip(shard["column_names"], shard["column_encodings"], sizes, strict=True):
        columns[name] = _decoded(encoding, content[position : position + size], name)
        position += size
    return columns


def _decoded(encoding: str, content: bytes, name: str) -> Any:
    kind, _, details = encoding.partition(":")
    if kind == "str":
        return content.decode()
    if kind == "json":
        return json.loads(content)
    if kind in _SCALARS:
        return numpy.frombuffer(content, _SCALARS[kind])[0]
    if kind == "ndarray":
        return _array(content, *details.split(":")) if details else _array(content)
    # Pickles among them: reading one would run what it says.
    raise invalid(f"encoding of the column {name}", "str, json, ndarray or a number", encoding)


def _array(content: bytes, dtype: str = "", shape_text: str = "") -> numpy.ndarray:
    position = 0
    if dtype:
        value_type = numpy.dtype(dtype).newbyteorder("<")
    else:
        value_type, position = numpy.dtype(_VALUE_TYPES[content[0]]), 1
    if shape_text:
        shape = tuple(map(int, shape_text.split(",")))
    else:
        num_dims, code = content[position] >> 2, content[position] & 3
        shape_type = numpy.dtype(_SHAPE_TYPES[code])
        shape = tuple(numpy.frombuffer(content, shape_type, num_dims, position + 1).tolist())
        position += 1 + num_dims * shape_type.itemsize
    return numpy.frombuffer(content, value_type, math.prod(shape), position).reshape(shape)
