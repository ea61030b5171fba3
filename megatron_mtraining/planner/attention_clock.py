"""Times of one layer's attention for every plan, from an index that represents all layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from .. import metrics
from ..config import MTrainingConfig
from ..metrics import Recording, RingWork, rank_pairs, work_of_pairs
from ..metrics.indices import drawn_index, max_slash_for
from ..types import VerticalSlashIndex
from .clock import CallSizes, Prediction, predict
from .model import ModelShape
from .plan import NONE, TRANSFORMER_ENGINE, Plan
from .profile import Profile

DRAWN_HEADS = 2  # of an index, a pair of mirrored ones: all are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The index of a few heads, which represent all, and the sequence's length."""

    index: VerticalSlashIndex
    seq_len: int
    flags: str  # that make a run select as much
    source: str  # origin of the index

    @property
    def density(self) -> float:
        """Selected over causal pairs, mean over heads."""
        return float(metrics.density(self.index, seq_len=self.seq_len).mean())

    @property
    def pack_width(self) -> int:
        """Vertical rows of a list, sinks included; dense attention has none."""
        return int(self.index.num_vertical.max())


def load_of_density(
    seq_len: int, density: float | None, *, max_vertical: int | None = None, max_slash: int | None = None
) -> Load:
    """Return an index drawn at ``density``, of all pairs at 1; without one, of full caps.

    Raises:
        ValueError: sinks, local blocks and verticals alone exceed the density.
    """
    config = MTrainingConfig.algorithm_1(budget="fixed")
    if density == 1:
        index = VerticalSlashIndex.dense(rows=1, num_heads=1, seq_len=seq_len, block_size=config.block_size)
        return Load(index=index, seq_len=seq_len, flags="", source="dense")
    most = config.max_vertical if max_vertical is None else max_vertical
    max_slash = config.max_slash if max_slash is None else max_slash
    if density is not None:
        max_slash = max_slash_for(seq_len, target_density=density, max_vertical=most)
    index = drawn_index(seq_len, num_heads=DRAWN_HEADS, max_vertical=most, max_slash=max_slash)
    always = f"--mtraining-sink-tokens {config.sink_tokens} --mtraining-local-blocks {config.local_blocks}"
    flags = f"--mtraining-budget fixed {always} --mtraining-max-vertical {most} --mtraining-max-slash {max_slash}"
    return Load(index=index, seq_len=seq_len, flags=flags, source=f"drawn, {most} verticals and {max_slash} slashes")


def load_of_recording(seq_len: int, path: Path) -> Load:
    """Return a recorded index, all its heads, stretched to ``seq_len``, a multiple of its own length."""
    recording = Recording.load(path)
    index = recording.index(seq_len=seq_len, num_heads=len(recording.slash))
    return Load(index=index, seq_len=seq_len, flags="", source=f"recorded in {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionClock:
    """Predictions of one layer's attention, each computed once."""

    model: ModelShape
    load: Load
    profile: Profile
    _pairs: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _predictions: dict[Plan, Prediction] = field(default_factory=dict, repr=False)

    def predict(self, plan: Plan) -> Prediction:
        """Predict forward and backward of one layer's attention, without selection."""
        key = replace(plan, pp=1, dp=1, global_batch=1, recompute=NONE, offload=False)
        if key not in self._predictions:
            self._predictions[key] = self._predict(key)
        return self._predictions[key]

    def selection_seconds(self, plan: Plan) -> float:
        """Return the time of one selection: a rank scores its heads' window on its own keys; four small collectives."""
        if plan.attention == TRANSFORMER_ENGINE:
            return 0.0
        scores = MTrainingConfig().num_probe_rows * plan.local_tokens * self.model.heads(plan.tp)[0]
        latency_us = self.profile.outer_latency_us if plan.cp > plan.ring_node_size else self.profile.inner_latency_us
        return scores / (1e9 * self.profile.selection_gpairs_s) + (4e-6 * latency_us if plan.cp > 1 else 0.0)

    def _predict(self, plan: Plan) -> Prediction:
        is_dense = plan.attention == TRANSFORMER_ENGINE
        load = load_of_density(plan.seq_len, 1) if is_dense else self.load
        layout, (heads, kv_heads) = plan.token_layout(), self.model.heads(plan.tp)
        if (layout, is_dense) not in self._pairs:
            self._pairs[layout, is_dense] = rank_pairs(load.index, layout)
        counted = work_of_pairs(*self._pairs[layout, is_dense], plan.ring.source_ranks())
        work = RingWork(*(each * heads // load.index.num_lists for each in (counted.slash, counted.vertical)))
        shape = {"seq_len": plan.seq_len, "head_dim": self.model.head_dim, "num_lists": plan.num_lists(self.model)}
        sizes = CallSizes(num_heads=heads, num_kv_heads=kv_heads, **shape)
        width = 0 if is_dense or plan.cp == 1 else self.load.pack_width
        return predict(work, plan.ring, sizes, self.profile, pack_width=width, is_dense=is_dense)
