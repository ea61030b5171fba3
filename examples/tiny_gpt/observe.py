"""Looks at attention while the model reads a held-out text: what it keeps, what that recalls, how the work falls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_mtraining import MTrainingConfig, gather_sequence
from megatron_mtraining import megatron as mtraining
from megatron_mtraining.megatron import LayerRecord
from megatron_mtraining.metrics import RingWork, attention_recall, density, held_out_rows, ring_work
from megatron_mtraining.ring import ring_schedule
from megatron_mtraining.transport import as_transport

from .steps import Stepper

RECALL_ROWS = 128
"""Rows whose recall is averaged, spread over those that the estimator did not look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What the attention layers did with one held-out sequence."""

    config: MTrainingConfig
    inner_size: int
    loss: float
    """Mean loss per token of that sequence."""

    layers: dict[int, LayerRecord]
    """By layer number from 1; the index has a list for each query head."""

    recall: dict[int, Tensor]
    """``[num_heads]`` for each layer: attention mass on the kept keys, the mean over held-out rows."""

    def density(self, layer: int) -> Tensor:
        """``[num_heads]``: kept share of the causal pairs."""
        record = self.layers[layer]
        return density(record.index, seq_len=record.layout.seq_len)

    def work(self, layer: int, *, layout: str | None = None) -> RingWork:
        """How the layer's pairs fall to ranks and steps, or would fall under another layout."""
        record = self.layers[layer]
        own = record.layout
        if layout is not None:
            own = replace(own, kind=layout, node_size=self.inner_size)
        schedules = (
            ring_schedule(self.config.schedule, cp_rank=rank, cp_size=own.cp_size, inner_size=self.inner_size)
            for rank in range(own.cp_size)
        )
        return ring_work(record.index, own, [schedule.source_ranks for schedule in schedules])

    def summary(self) -> dict[str, float]:
        """Means over layers and the least recall, under the names of :class:`tiny_gpt.journal.Observation`."""
        work = [self.work(layer) for layer in self.layers]
        return {
            "held_out_loss": self.loss,
            "density": _mean([self.density(layer) for layer in self.layers]),
            "recall": _mean(list(self.recall.values())),
            "worst_layer_recall": min(float(recall.mean()) for recall in self.recall.values()),
            "worst_head_recall": min(float(recall.min()) for recall in self.recall.values()),
            "worker_imbalance": sum(w.worker_imbalance for w in work) / len(work),
            "step_imbalance": sum(w.step_imbalance for w in work) / len(work),
        }


def observe_attention(stepper: Stepper, batch: dict[str, Tensor]) -> Attention:
    """Evaluates one whole batch of a single sequence and records its attention. A collective over all ranks."""
    with mtraining.record_attention(capture_query_key=True) as recorder:
        loss = stepper.evaluate(batch)
    rows = held_out_rows(stepper.config, seq_len=batch["tokens"].shape[1], count=RECALL_ROWS)
    recall = {layer: _recall(record, rows) for layer, record in sorted(recorder.layers.items())}
    layers = {layer: _per_head(record) for layer, record in sorted(recorder.layers.items())}
    return Attention(config=stepper.config, inner_size=stepper.inner_size, loss=loss, layers=layers, recall=recall)


def _per_head(record: LayerRecord) -> LayerRecord:
    return replace(record, index=record.index.per_head(record.query.shape[2]))


def _recall(record: LayerRecord, rows: tuple[int, ...]) -> Tensor:
    group: dict[str, Any] = {}
    if record.layout.cp_size > 1:
        group = {"layout": record.layout, "groups": parallel_state.get_context_parallel_group()}
    recall = attention_recall(
        record.query, record.key, record.index, rows=rows, softmax_scale=record.softmax_scale, **group
    )
    return recall.mean(dim=(0, 2)).cpu()


def dump_queries_and_keys(attention: Attention, path: Path) -> None:
    """Saves the last layer's whole query and key for ``mtraining recall --load``. A collective over all ranks."""
    record = attention.layers[max(attention.layers)]
    group = as_transport(parallel_state.get_context_parallel_group())
    query, key = (
        gather_sequence(group.all_gather(part.contiguous()).unbind(), record.layout, dim=1).cpu()
        for part in (record.query, record.key)
    )
    if group.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"query": query, "key": key, "softmax_scale": record.softmax_scale}, path)


def _mean(per_layer: list[Tensor]) -> float:
    return float(torch.stack(per_layer).double().mean())
