"""Index sets that the selection chose on a trained model, kept as small files, and their stretching to other lengths.

A file holds, for each query head of one layer, the runs of neighbouring columns and of neighbouring block distances.

Stretching by a whole factor ``f`` multiplies where each run starts by ``f`` and leaves its length as it is; the run
that begins at 0 (sinks, local blocks) stays where it is. So a set keeps its number of entries and how they hang
together, and its density falls by about ``f``. It is a stated extrapolation: nobody ran the selection at that length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_mtraining.errors import invalid
from megatron_mtraining.types import VerticalSlashIndex

from .problem import Problem

FORMAT = "vertical-slash runs 1"

Runs = list[list[int]]
"""``[first, length]`` of each run, ascending."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What one layer's heads kept."""

    seq_len: int
    """Tokens in the sequence that the selection saw."""

    block_size: int
    vertical: list[Runs]
    """Runs of columns of each query head."""

    slash: list[Runs]
    """Runs of block distances of each query head."""

    source: dict[str, object]
    """How it was made: configuration, recall and density, date and versions."""

    def index(self, problem: Problem) -> VerticalSlashIndex:
        """The sets, stretched to ``problem.seq_len``; head ``h`` gets those of recorded head ``h % recorded heads``.

        Raises:
            ValueError: the problem's length is not a multiple of the recorded one.
        """
        factor, rest = divmod(problem.seq_len, self.seq_len)
        if rest or not factor:
            raise invalid("--seq", f"a multiple of the {self.seq_len} tokens that were recorded", problem.seq_len)
        vertical, slash = (
            [[stretched(heads[h % len(heads)], factor) for h in range(problem.num_heads)]] * problem.batch
            for heads in (self.vertical, self.slash)
        )
        return VerticalSlashIndex.from_lists(
            vertical, slash, seq_len=problem.seq_len, block_size=self.block_size, device=problem.device
        )

    def save(self, path: Path) -> None:
        """Writes the file, one head's runs to a line."""
        fields = asdict(self)
        heads = {name: fields.pop(name) for name in ("vertical", "slash")}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in {"format": FORMAT, **fields}.items()]
        for name, runs in heads.items():
            rows = ",\n  ".join(json.dumps(head, separators=(",", ":")) for head in runs)
            lines.append(f' "{name}": [\n  {rows}\n ]')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: it is not such a file.
        """
        try:
            fields = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise invalid(
                "--index", "random, clustered or a file made by tools.bench.record", f"{path}: {error}"
            ) from None
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise invalid("--index", f"a file with format {FORMAT!r}", path, "Make one with tools.bench.record.")
        return cls(**fields)


def runs_of(entries: Sequence[int]) -> Runs:
    """Ascending integers as ``[first, length]`` of their runs."""
    runs: Runs = []
    for entry in entries:
        if runs and entry == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([entry, 1])
    return runs


def stretched(runs: Runs, factor: int) -> list[int]:
    """The entries of ``runs`` after each run's start was multiplied by ``factor``."""
    return [first * factor + i for first, length in runs for i in range(length)]
