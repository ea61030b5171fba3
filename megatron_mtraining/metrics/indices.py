"""Indices that no selection makes in a run: drawn ones of a wanted density, and recorded ones, stretched to a length.

A recording is a file of kilobytes. For each list of one layer, a query head's or a key/value head's, it holds the runs
of neighbouring columns and of neighbouring block distances.

Stretching by a whole factor ``f`` multiplies where each run starts by ``f`` and leaves its length as it is; the run
that begins at 0 (sinks, local blocks) stays where it is. So a set keeps its number of entries and how they hang
together, and its density falls by about ``f``. It is a stated extrapolation: nobody ran the selection at that length.

All starts are then multiples of ``f``, and where ``f`` shares factors with the number of ranks slashes fall into few
steps of a striped ring. Scattered stretching avoids that accident: a run starts anywhere among the ``f`` places that
its start stands for, drawn from a generator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from ..config import MTrainingConfig
from ..console import read_json
from ..errors import as_integer, invalid
from ..types import VerticalSlashIndex
from .density import density

_SAMPLED_HEADS = 8

_RUN = 16
"""Most neighbours in a run of a drawn index: selections choose runs, and these decide how even ranks are."""


def density_of_caps(seq_len: int, *, max_vertical: int, max_slash: int) -> float:
    """Return the density that a head is expected to have when both caps bind and no key stands out.

    Beside the sinks and local blocks of the default configuration come ``max_vertical`` columns drawn evenly, counted
    exactly for each of a few drawn heads, and ``max_slash`` distances drawn evenly from the M others: each pair not
    selected before is then selected with probability ``max_slash / M``.
    """
    index = drawn_index(seq_len, num_heads=_SAMPLED_HEADS, max_vertical=max_vertical, max_slash=0)
    without_slashes = density(index, seq_len=seq_len).mean().item()
    others = _other_distances(seq_len)
    return without_slashes + (1 - without_slashes) * (min(max_slash / others, 1.0) if others else 0.0)


def max_slash_for(seq_len: int, *, target_density: float, max_vertical: int) -> int:
    """Return the ``max_slash`` whose expected density is nearest to ``target_density``.

    Raises:
        ValueError: sinks, local blocks and verticals alone exceed it.
    """
    without_slashes = density_of_caps(seq_len, max_vertical=max_vertical, max_slash=0)
    if without_slashes > target_density:
        rule = f"at least {without_slashes:.4f}, the density of {max_vertical} verticals in {seq_len} tokens"
        raise invalid("density", rule, f"{target_density:g}", "Lower the number of verticals, or raise the density.")
    return round(_other_distances(seq_len) * (target_density - without_slashes) / (1 - without_slashes))


def drawn_index(
    seq_len: int, *, num_heads: int, max_vertical: int, max_slash: int, seed: int = 0
) -> VerticalSlashIndex:
    """Draw sinks and local blocks of the default configuration, and as many others of each as the caps allow, in runs.

    The sequence is cut into as many equal pieces as there are runs, with one drawn run in each; of two heads the second
    mirrors the first inside the pieces. So the density hardly depends on the draw.
    """
    config, generator = MTrainingConfig.algorithm_1(), torch.Generator().manual_seed(seed)

    def others(most: int, count: int) -> Iterator[list[int]]:
        num_runs = -(-most // _RUN)
        edges, ends = (torch.arange(num_runs + 1, device="cpu") * total // max(num_runs, 1) for total in (count, most))
        for head in range(num_heads):
            if head % 2 == 0:
                position = torch.rand(num_runs, dtype=torch.float64, generator=generator, device="cpu")
            room = (edges.diff() - ends.diff()) * (1 - position if head % 2 else position)
            runs = zip((edges[:-1] + room.long()).tolist(), ends.diff().tolist(), strict=True)
            yield [entry for first, length in runs for entry in range(first, first + length)]

    def lists(always: int, most: int, stop: int) -> list[list[int]]:
        always = min(always, stop)
        free = stop - always
        return [[*range(always), *(always + each for each in head)] for head in others(min(most, free), free)]

    num_blocks = -(-seq_len // config.block_size)
    vertical = lists(config.sink_tokens, max_vertical, seq_len)
    slash = lists(config.local_blocks, max_slash, num_blocks)
    return VerticalSlashIndex.from_lists([vertical], [slash], seq_len=seq_len, block_size=config.block_size)


def _other_distances(seq_len: int) -> int:
    """Block distances that are not local."""
    config = MTrainingConfig.algorithm_1()
    return max(-(-seq_len // config.block_size) - config.local_blocks, 0)


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
