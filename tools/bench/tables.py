"""Turn the files of docs/benchmarks into the tables that people read there.

python -m tools.bench.tables > docs/benchmarks/RESULTS.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_mtraining.console import text_table

from .report import DEFAULT_FOLDER

Row = dict[str, Any]

TITLE = """\
# Results

Made from the files in this folder by `python -m tools.bench.tables`; [README](README.md) says what a number means.
Times are medians of whole calls through the public function. Efficiency is the fastest dense time, times the
density, over the time. MHz is the card's clock right after the calls: at its power limit it falls, and all speeds
with it.
"""

ATTENTION: list[tuple[str, str, str]] = [
    ("ms", "ms", "{:.2f}"),
    ("tflops", "useful TFLOP/s", "{:.0f}"),
    ("efficiency", "efficiency", "{:.2f}"),
    ("issued_per_useful", "issued/useful", "{:.2f}"),
    ("extra_mib", "extra MiB", "{:.0f}"),
    ("step_mib", "step MiB", "{:.0f}"),
    ("sm_mhz", "MHz", "{:.0f}"),
]
ROUTINE: list[tuple[str, str, str]] = [
    ("ms", "ms", "{:.3f}"),
    ("share_of_forward", "of the forward", "{:.2%}"),
    ("extra_mib", "extra MiB", "{:.0f}"),
]
"""Field, heading and format; a column without a value in any row is not shown."""


def document(folder: Path = DEFAULT_FOLDER) -> str:
    """Return the whole page, one section for each file in the order of their names."""
    sections = (section(path.name, json.loads(path.read_text())) for path in sorted(folder.glob("*.json")))
    return "\n".join([TITLE, *sections])


def section(name: str, written: Row) -> str:
    """Return the measurements of one run, where and how."""
    cudnn = written["cudnn"] or "not torch's own"
    software = f"torch {written['torch']}, cuDNN {cudnn}, driver {written['driver']}"
    how = f"{written['repeats']} repeats"
    if written.get("longest_s"):
        how += f", fewer of calls that take {written['longest_s']:g} s together"
    if written.get("rest_ms"):
        how += f", {written['rest_ms']:g} ms of rest before each"
    where = f"{written['gpu'] or 'CPU'}, {written['date'][:10]}, {software}, commit {written['commit'][:12]}"
    lines = [f"## {name.removesuffix('.json')}", "", f"`{written['command']}`", "", f"{where}; {how}.", ""]
    for case in written["cases"]:
        lines += case_lines(case, written["problem"])
    return "\n".join(lines)


def case_lines(case: Row, problem: Row) -> Iterator[str]:
    """Yield a caption and a table for attention, one for what runs before it, and the missing baselines."""
    sizes = f"{problem['seq_len']} tokens, {problem['num_heads']}/{problem['num_kv_heads']} heads"
    lists = f"{case['distances']:.0f} distances and {case['verticals']:.0f} verticals a head"
    density = f"density {100 * case['density']:.2f} %"
    yield f"**{case['label']}**: {sizes}, head_dim {problem['head_dim']}, {problem['dtype']}; {lists}, {density}"
    yield ""
    routines = ("selection", "selection passes", "packing")
    for operations, columns in ((("forward", "backward"), ATTENTION), (routines, ROUTINE)):
        rows = [(operation, row) for operation in operations for row in case["rows"].get(operation, [])]
        if rows:
            yield from table(rows, columns)
            yield ""
    missing = [f"- {name}: not here. {why}" for name, why in {**case["absent"], **case["failed"]}.items()]
    yield from [*missing, ""] if missing else []


def table(rows: list[tuple[str, Row]], columns: list[tuple[str, str, str]]) -> list[str]:
    """Return a Markdown table with a line for each baseline and operation."""
    shown = [column for column in columns if any(row.get(column[0]) is not None for _, row in rows)]
    cells = [
        [
            operation,
            row["baseline"],
            *("" if (value := row.get(name)) is None else form.format(value) for name, _, form in shown),
        ]
        for operation, row in rows
    ]
    return text_table(["operation", "baseline", *(heading for _, heading, _ in shown)], cells, markdown=True)


if __name__ == "__main__":
    sys.stdout.write(document())
