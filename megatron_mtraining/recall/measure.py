"""Density and recall of every selection on the layers of a text, and what follows for a training run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from ..attention import select
from ..config import MTrainingConfig
from ..errors import invalid
from ..metrics import AttentionCall, held_out_rows

TARGETS = (0.80, 0.90, 0.95, 0.98)
"""``target_recall`` of the selections by cost."""

DIFFUSE = 0.8
"""Density of a layer above which nearly every head is dense, so that a selection saves nothing."""


def selections(*, length: int, targets: tuple[float, ...] = TARGETS) -> dict[str, MTrainingConfig]:
    """Return the selections that are compared, by name; every text is estimated.

    ``fixed 1/64+1/85`` has a column for each 64 tokens, a distance for each 85 blocks: at 65536 tokens 1024 and 12.

    Args:
        length: tokens; numbers of columns, distances and chunks that a user would scale with it are its shares.
        targets: of the selections by cost.
    """
    block = MTrainingConfig().block_size
    chunk = max(1, length // 128 // block) * block
    return {
        **{f"cost {target:g}": MTrainingConfig(target_recall=target, dense_below=0) for target in targets},
        "algorithm 1": MTrainingConfig.algorithm_1(dense_below=0),
        "fixed 1/64+1/85": MTrainingConfig(
            budget="fixed", max_vertical=length // 64, max_slash=max(1, length // block // 85), dense_below=0
        ),
        "moba 12 of 128": MTrainingConfig(pattern="moba", moba_chunk=chunk, moba_top_k=12, dense_below=0),
        "xattention": MTrainingConfig(pattern="xattention", dense_below=0),
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """Means of one selection over texts."""

    density: float
    recall: float
    """Mean over layers and heads."""

    density_by_layer: dict[int, float]
    recall_by_layer: dict[int, float]
    worst_head: tuple[int, int, float]
    """Layer from 1, head from 0, recall."""


@dataclass(slots=True)
class Measurement:
    """Receiver of attention calls that selects keys for each in several ways."""

    configs: Mapping[str, MTrainingConfig]
    num_rows: int
    """Rows whose recall is measured: probed by no selection, evenly spread over the last three quarters."""

    densities: dict[str, dict[int, list[Tensor]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    recalls: dict[str, dict[int, list[Tensor]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """``[num_heads]`` of each call, by selection and layer."""

    def take(self, call: AttentionCall) -> None:
        """Select and measure.

        Raises:
            ValueError: every row of the text is probed.
        """
        length = call.query.shape[1]
        rows = held_out_rows(
            *self.configs.values(),
            seq_len=length,
            count=self.num_rows,
            cu_seqlens=call.cu_seqlens,
            first=length // 4,
        )
        if not rows:
            raise invalid("--length", "so long that some rows are not probed", length, "Give a longer text.")
        for name, config in self.configs.items():
            index = select(call.query, call.key, config, softmax_scale=call.softmax_scale, cu_seqlens=call.cu_seqlens)
            measured = replace(call, index=index)
            self.densities[name][call.layer].append(measured.density.mean().cpu())
            self.recalls[name][call.layer].append(measured.recall(rows).mean(1).cpu())

    def summary(self, name: str) -> Summary:
        """Return the means of one selection."""
        density = {layer: float(torch.stack(each).mean()) for layer, each in sorted(self.densities[name].items())}
        heads = {layer: torch.stack(each).mean(0) for layer, each in sorted(self.recalls[name].items())}
        worst = min((float(recall.min()), layer, int(recall.argmin())) for layer, recall in heads.items())
        return Summary(
            density=sum(density.values()) / len(density),
            recall=sum(float(recall.mean()) for recall in heads.values()) / len(heads),
            density_by_layer=density,
            recall_by_layer={layer: float(recall.mean()) for layer, recall in heads.items()},
            worst_head=(worst[1], worst[2], worst[0]),
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings for a training run on such texts."""

    target_recall: float
    dense_layers: tuple[int, ...]
    is_reached: bool
    """True if the recall that was asked for is reached on rows that were not probed."""

    @property
    def flags(self) -> str:
        """Flags of the launcher."""
        layers = f" --mtraining-dense-layers {' '.join(map(str, self.dense_layers))}" if self.dense_layers else ""
        return f"--mtraining-target-recall {self.target_recall:g}{layers}"


def propose(configs: Mapping[str, MTrainingConfig], summaries: Mapping[str, Summary], *, goal: float) -> Proposal:
    """Return the lowest target whose mean recall reaches ``goal``, and the layers to compute densely.

    These are the layers that at this target compute more than DIFFUSE of their pairs, and so gain nothing by a
    selection, or recall so much less than the others that they miss the goal by more than twice its distance from 1.
    """
    by_target = sorted(
        (config.target_recall, summaries[name])
        for name, config in configs.items()
        if config.pattern == "vertical_slash" and config.budget == "cost"
    )
    reached = [(target, summary) for target, summary in by_target if summary.recall >= goal]
    target, summary = (reached or by_target[-1:])[0]
    least = 1 - 3 * (1 - goal)
    layers = {
        *(layer for layer, density in summary.density_by_layer.items() if density > DIFFUSE),
        *(layer for layer, recall in summary.recall_by_layer.items() if recall < least),
    }
    return Proposal(target, tuple(sorted(layers)), bool(reached))


def layers_of(summaries: Mapping[str, Summary]) -> list[int]:
    """Return the numbers of all layers, ascending."""
    return sorted(set(chain.from_iterable(summary.recall_by_layer for summary in summaries.values())))
