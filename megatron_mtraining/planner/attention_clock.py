"""Times of one layer's attention for every way to spread it, from an index that stands for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import MTrainingConfig
from ..telemetry import Recording, density
from ..types import VerticalSlashIndex
from .caps import drawn_index, max_slash_for
from .model_shape import ModelShape
from .owner_pairs import OwnerPairs, rank_pairs
from .plan import TRANSFORMER_ENGINE, Plan
from .profile import Profile
from .timeline import Prediction, predict
from .traffic import CallSizes

DRAWN_HEADS = 2
"""Heads of an index that is drawn, a pair of mirrored ones: all are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What attention computes: the index of a few heads, which stand for all, and the sequence's length."""

    index: VerticalSlashIndex
    seq_len: int
    flags: tuple[tuple[str, ...], ...]
    """The flags that make a run select as much."""

    source: str
    """Where the index comes from."""

    @property
    def kept(self) -> float:
        """Kept over causal pairs, mean over heads."""
        return float(density(self.index, seq_len=self.seq_len).mean())

    @property
    def pack_width(self) -> int:
        """Vertical rows of a list, sinks included; dense attention has none."""
        return int(self.index.num_vertical.max())


def load_of_density(
    seq_len: int, kept_share: float | None, *, max_vertical: int | None = None, max_slash: int | None = None
) -> Load:
    """An index drawn at a density; without one, as the caps let a head keep at most.

    Args:
        seq_len: tokens in the sequence.
        kept_share: kept over causal pairs, or None.
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
    """Every causal pair, for TransformerEngine's attention: no flags of ours."""
    index = VerticalSlashIndex.dense(rows=1, num_heads=1, seq_len=seq_len, block_size=MTrainingConfig().block_size)
    return Load(index=index, seq_len=seq_len, flags=(), source="dense")


def load_of_recording(seq_len: int, path: Path) -> Load:
    """A recorded index, all its heads, stretched to ``seq_len``.

    Raises:
        ValueError: no recording, or one whose length does not divide ``seq_len``.
    """
    recording = Recording.load(path)
    index = recording.index(seq_len=seq_len, num_heads=len(recording.slash))
    return Load(index=index, seq_len=seq_len, flags=(), source=f"recorded in {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionClock:
    """Predicts each way once."""

    model: ModelShape
    load: Load
    profile: Profile
    _pairs: dict[tuple[object, ...], OwnerPairs] = field(default_factory=dict, repr=False)
    _predictions: dict[tuple[object, ...], Prediction] = field(default_factory=dict, repr=False)

    def predict(self, plan: Plan) -> Prediction:
        """Forward and backward of one layer's attention, selection left out."""
        key = (plan.tp, plan.cp, plan.layout, plan.schedule, plan.attention, plan.index_sharing)
        if key not in self._predictions:
            self._predictions[key] = self._predict(plan)
        return self._predictions[key]

    def selection_seconds(self, plan: Plan) -> float:
        """One selection: every rank scores the window of its heads against its own keys; four small collectives."""
        if plan.attention == TRANSFORMER_ENGINE:
            return 0.0
        scores = MTrainingConfig().window * plan.local_tokens * self.model.heads(plan.tp)[0]
        latency = 0.0
        if plan.cp > 1:
            spans_nodes = plan.cp > plan.ring_node_size
            latency = 4e-6 * (self.profile.outer_latency_us if spans_nodes else self.profile.inner_latency_us)
        return scores / (1e9 * self.profile.selection_gpairs_s) + latency

    def _predict(self, plan: Plan) -> Prediction:
        is_dense = plan.attention == TRANSFORMER_ENGINE
        pairs = self._pairs_of(plan, is_dense=is_dense)
        heads, kv_heads = self.model.heads(plan.tp)
        counted = 1 if is_dense else self.load.index.num_lists
        work = plan.tour.work(pairs)
        work = replace(work, slash=work.slash * heads // counted, vertical=work.vertical * heads // counted)
        sizes = CallSizes(
            seq_len=plan.seq_len,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.model.head_dim,
            num_lists=kv_heads if plan.index_sharing == "kv_group" else heads,
        )
        width = 0 if is_dense or plan.cp == 1 else self.load.pack_width
        return predict(work, plan.tour, sizes, self.profile, pack_width=width, is_dense=is_dense)

    def _pairs_of(self, plan: Plan, *, is_dense: bool) -> OwnerPairs:
        layout = plan.token_layout()
        key = (layout, is_dense)
        if key not in self._pairs:
            load = dense_load(plan.seq_len) if is_dense else self.load
            self._pairs[key] = rank_pairs(load.index, layout)
        return self._pairs[key]
