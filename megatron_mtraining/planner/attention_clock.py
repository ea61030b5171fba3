"""Times of one layer's attention for every way to spread it, from an index that stands for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ..config import MTrainingConfig
from ..metrics import Recording, RingWork, density, rank_pairs
from ..metrics.drawn import drawn_index, max_slash_for
from ..types import VerticalSlashIndex
from .clock import CallSizes, Prediction, predict
from .model import ModelShape
from .plan import TRANSFORMER_ENGINE, Plan
from .profile import Profile

DRAWN_HEADS = 2
"""Heads of an index that is drawn, a pair of mirrored ones: all are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The index of a few heads, which stand for all, and the sequence's length."""

    index: VerticalSlashIndex
    seq_len: int
    flags: tuple[tuple[str, ...], ...]
    """Flags that make a run select as much."""

    source: str
    """Origin of the index."""

    @property
    def kept(self) -> float:
        """Selected over causal pairs, mean over heads."""
        return float(density(self.index, seq_len=self.seq_len).mean())

    @property
    def pack_width(self) -> int:
        """Vertical rows of a list, sinks included; dense attention has none."""
        return int(self.index.num_vertical.max())


def load_of_density(
    seq_len: int, kept_share: float | None, *, max_vertical: int | None = None, max_slash: int | None = None
) -> Load:
    """Return an index drawn at a density; without one, as the caps let a head keep at most.

    Args:
        seq_len: tokens in the sequence.
        kept_share: selected over causal pairs, or None.
        max_vertical: verticals beside the sinks, or None for the default configuration's.
        max_slash: distances beside the local blocks, likewise; ``kept_share`` gives them by itself.

    Raises:
        ValueError: sinks, local blocks and verticals alone keep more.
    """
    config = MTrainingConfig()
    most = config.max_vertical if max_vertical is None else max_vertical
    max_slash = config.max_slash if max_slash is None else max_slash
    if kept_share is not None:
        max_slash = max_slash_for(seq_len, kept_share=kept_share, max_vertical=most)
    index = drawn_index(seq_len, num_heads=DRAWN_HEADS, max_vertical=most, max_slash=max_slash)
    flags = (("--mtraining-max-vertical", str(most)), ("--mtraining-max-slash", str(max_slash)))
    return Load(index=index, seq_len=seq_len, flags=flags, source=f"drawn, {most} verticals and {max_slash} slashes")


def dense_load(seq_len: int) -> Load:
    """Return every causal pair, for TransformerEngine's attention: no flags of ours."""
    index = VerticalSlashIndex.dense(rows=1, num_heads=1, seq_len=seq_len, block_size=MTrainingConfig().block_size)
    return Load(index=index, seq_len=seq_len, flags=(), source="dense")


def load_of_recording(seq_len: int, path: Path) -> Load:
    """Return a recorded index, all its heads, stretched to ``seq_len``.

    Raises:
        ValueError: no recording, or one whose length does not divide ``seq_len``.
    """
    recording = Recording.load(path)
    index = recording.index(seq_len=seq_len, num_heads=len(recording.slash))
    return Load(index=index, seq_len=seq_len, flags=(), source=f"recorded in {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionClock:
    """Clock that predicts each way once."""

    model: ModelShape
    load: Load
    profile: Profile
    _pairs: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _predictions: dict[tuple[object, ...], Prediction] = field(default_factory=dict, repr=False)

    def predict(self, plan: Plan) -> Prediction:
        """Predict forward and backward of one layer's attention, selection left out."""
        key = (plan.tp, plan.cp, plan.layout, plan.schedule, plan.attention, plan.index_sharing)
        if key not in self._predictions:
            self._predictions[key] = self._predict(plan)
        return self._predictions[key]

    def selection_seconds(self, plan: Plan) -> float:
        """Return the time of one selection: a rank scores its heads' window on its own keys; four small collectives."""
        if plan.attention == TRANSFORMER_ENGINE:
            return 0.0
        scores = MTrainingConfig().num_probe_rows * plan.local_tokens * self.model.heads(plan.tp)[0]
        spans_nodes = plan.cp > plan.ring_node_size
        latency = 4e-6 * (self.profile.outer_latency_us if spans_nodes else self.profile.inner_latency_us)
        return scores / (1e9 * self.profile.selection_gpairs_s) + (latency if plan.cp > 1 else 0.0)

    def _predict(self, plan: Plan) -> Prediction:
        is_dense = plan.attention == TRANSFORMER_ENGINE
        load = dense_load(plan.seq_len) if is_dense else self.load
        layout, (heads, kv_heads) = plan.token_layout(), self.model.heads(plan.tp)
        if (layout, is_dense) not in self._pairs:
            self._pairs[layout, is_dense] = rank_pairs(load.index, layout)
        counted = plan.ring.work(*self._pairs[layout, is_dense])
        work = RingWork(*(each * heads // load.index.num_lists for each in (counted.slash, counted.vertical)))
        sizes = CallSizes(
            seq_len=plan.seq_len,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.model.head_dim,
            num_lists=plan.num_lists(self.model),
        )
        width = 0 if is_dense or plan.cp == 1 else self.load.pack_width
        return predict(work, plan.ring, sizes, self.profile, pack_width=width, is_dense=is_dense)
