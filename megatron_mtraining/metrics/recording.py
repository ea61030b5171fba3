"""Index sets that the selection chose, kept as files of kilobytes, and their stretching to other lengths.

A file holds, for each list of one layer, a query head's or a key/value head's, the runs of neighbouring columns and of
neighbouring block distances.

Stretching by a whole factor ``f`` multiplies where each run starts by ``f`` and leaves its length as it is; the run
that begins at 0 (sinks, local blocks) stays where it is. So a set keeps its number of entries and how they hang
together, and its density falls by about ``f``. It is a stated extrapolation: nobody ran the selection at that length.

All starts are then multiples of ``f``, and where ``f`` shares factors with the number of ranks slashes fall into few
steps of a striped ring. Scattered stretching avoids that accident: a run starts anywhere among the ``f`` places that
its start stands for, drawn from a generator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from ..console import read_json
from ..errors import as_integer, invalid
from ..types import VerticalSlashIndex

FORMAT = "vertical-slash runs 1"

Runs = list[list[int]]
"""``[first, length]`` of each run, ascending."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Pairs that one layer's heads, or groups of heads, select of one document."""

    seq_len: int
    """Tokens in the sequence that the selection saw."""

    block_size: int
    """Tokens in a block of the slash grid."""

    vertical: list[Runs]
    """Runs of columns of each list."""

    slash: list[Runs]
    """Runs of block distances of each list."""

    source: dict[str, object]
    """Source of the recording: configuration, recall and density, date and versions."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "block_size"):
            as_integer(f"{name} of a recorded index", getattr(self, name), least=1)
        for name in ("vertical", "slash"):
            heads = getattr(self, name)
            if not isinstance(heads, list) or len(heads) != len(self.vertical) or not heads:
                raise invalid(f"{name} of a recorded index", "one list of runs for each head", f"{heads!r:.60}")
            stop = self.seq_len if name == "vertical" else -(-self.seq_len // self.block_size)
            for head, runs in enumerate(heads):
                if not _are_runs(runs, stop):
                    rule = f"ascending [first, length] below {stop}"
                    raise invalid(f"{name}[{head}] of a recorded index", rule, f"{runs!r:.60}")
        for head, runs in enumerate(self.slash):
            if not runs or runs[0][0]:
                raise invalid(f"slash[{head}] of a recorded index", "runs from distance 0", f"{runs!r:.60}")

    @classmethod
    def of(cls, index: VerticalSlashIndex, *, seq_len: int, source: Mapping[str, object], row: int = 0) -> Recording:
        """Record one batch row of ``index``; packed documents are not recorded.

        Args:
            index: the global index, for instance ``LayerRecord.index`` of ``record_attention``.
            seq_len: tokens in the global sequence.
            source: what is to be known about it.
            row: which batch row.
        """

        def heads(entries: Tensor, counts: Tensor) -> list[Runs]:
            rows = zip(entries[row].tolist(), counts[row].tolist(), strict=True)
            return [runs_of(chosen[:count]) for chosen, count in rows]

        return cls(
            seq_len=seq_len,
            block_size=index.block_size,
            vertical=heads(index.vertical, index.num_vertical),
            slash=heads(index.slash, index.num_slash),
            source=dict(source),
        )

    def index(
        self,
        *,
        seq_len: int,
        num_heads: int,
        rows: int = 1,
        device: torch.device | str = "cpu",
        scatter: torch.Generator | None = None,
    ) -> VerticalSlashIndex:
        """Return the sets, stretched to ``seq_len``; list ``i`` is recorded list ``i % recorded lists``.

        Args:
            seq_len: tokens in the sequence, a multiple of the recorded one.
            num_heads: whose lists are wanted: query heads, or key/value heads, whose groups then share a list.
            rows: batch size; all rows are the same.
            device: where the index is wanted.
            scatter: draws where stretched runs start; without it at the first place.

        Raises:
            ValueError: ``seq_len`` is not a multiple of the recorded one.
        """
        factor, rest = divmod(seq_len, self.seq_len)
        if rest or not factor:
            raise invalid("seq_len", f"a multiple of the {self.seq_len} tokens that were recorded", seq_len)
        vertical, slash = (
            [[stretched(heads[i % len(heads)], factor, scatter) for i in range(num_heads)]] * rows
            for heads in (self.vertical, self.slash)
        )
        return VerticalSlashIndex.from_lists(
            vertical, slash, seq_len=seq_len, block_size=self.block_size, device=device
        )

    def save(self, path: Path) -> None:
        """Write the file, one head's runs to a line."""
        entries = asdict(self)
        heads = {name: entries.pop(name) for name in ("vertical", "slash")}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in {"format": FORMAT, **entries}.items()]
        for name, runs in heads.items():
            rows = ",\n  ".join(json.dumps(head, separators=(",", ":")) for head in runs)
            lines.append(f' "{name}": [\n  {rows}\n ]')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: it is not such a file.
        """
        remedy = "Make one with Recording.of(...).save(path), or with tools.bench.record."
        entries = read_json("a recorded index", path, remedy)
        if entries.pop("format", None) != FORMAT:
            raise invalid("a recorded index", f"a file with format {FORMAT!r}", path, remedy)
        names = {field.name for field in fields(cls)}
        if set(entries) != names:
            raise invalid(
                "a recorded index", f"of fields {', '.join(sorted(names))}", ", ".join(sorted(entries)), remedy
            )
        return cls(**entries)


def _are_runs(runs: object, stop: int) -> bool:
    """True if these are ascending ``[first, length]`` that do not overlap, below ``stop``."""
    at = 0
    for run in runs if isinstance(runs, list) else [None]:
        if not isinstance(run, list) or len(run) != 2 or not all(type(number) is int for number in run):
            return False
        first, length = run
        if first < at or length < 1 or first + length > stop:
            return False
        at = first + length
    return True


def runs_of(entries: Sequence[int]) -> Runs:
    """Return ascending integers as ``[first, length]`` of their runs."""
    runs: Runs = []
    for entry in entries:
        if runs and entry == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([entry, 1])
    return runs


def stretched(runs: Runs, factor: int, scatter: torch.Generator | None = None) -> list[int]:
    """Return the entries of ``runs`` after each run's start was multiplied by ``factor``.

    With ``scatter`` up to ``factor - 1`` is added to each start but 0; runs still neither overlap nor leave the length.
    """
    extra = [0] * len(runs)
    if scatter is not None:
        extra = torch.randint(factor, (len(runs),), generator=scatter, device="cpu").tolist()
    return [
        first * factor + (more if first else 0) + i
        for (first, length), more in zip(runs, extra, strict=True)
        for i in range(length)
    ]
