"""Density and recall of the selected keys: every layer, and the head that recalls least."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..megatron.runtime import LayerRecord, current_runtime
from ..metrics import attention_recall, held_out_rows
from .observation import Observation, densities
from .report import Report, gather_objects
from .training import rank_of

SELECTION = "selected keys"
_ROWS = 64
_NEARLY_ALL = 0.9
"""The density of every layer above which the checks hardly see a selection."""


def check_selection(observed: Observation, report: Report, density: str) -> None:
    """Measure every layer on rows that no estimator uses. A fault is only a recall that is no number."""
    shares = densities(observed.first)
    own = [_layer(name, call, shares[name]) for name, call in observed.first.items()]
    is_first = current_runtime().cp_group.rank() == 0 and rank_of("data_parallel") == 0
    gathered = sum(gather_objects(own if is_first else []), [])
    report.layers = [_worst([each for each in gathered if each["layer"] == name]) for name in _names(gathered)]
    wrong = [each["layer"] for each in report.layers if not 0.0 <= each["recall"] <= 1.0 + 1e-4]
    worst = min(report.layers, key=lambda layer: layer["worst_recall"])
    text = f"worst {worst['layer']}, head {worst['worst_head']}: recall {worst['worst_recall']:.4f}, {density}"
    report.add(SELECTION, f"no number in {', '.join(wrong)}" if wrong else text, passed=not wrong)
    if min((layer["density"] for layer in report.layers), default=0.0) > _NEARLY_ALL:
        remedy = "lower --mtraining-target-recall to see more of selection"
        report.notes.append(f"nearly every key is selected: {remedy}")
    report.notes.append("weights are those of a new model, so recall says little about a trained model's")


def mean_density(observed: Observation) -> float:
    """Return the density of all layers of the job. A collective over all ranks."""
    own = [float(share.mean()) for share in densities(observed.first).values()]
    every = sum(gather_objects(own), [])
    return sum(every) / max(1, len(every))


def in_percent(density: float) -> str:
    """Return a density as the end of a finding."""
    return f"density {density:.1%}"


def _layer(name: str, call: LayerRecord, density: Tensor) -> dict[str, Any]:
    """Return the metrics of one layer on this rank's heads. A collective over the context-parallel group."""
    config = current_runtime().config
    text = {"cu_seqlens": call.cu_seqlens, "num_valid": call.num_valid}
    rows = held_out_rows(config, seq_len=call.layout.seq_len, count=_ROWS, **text)
    given = {"softmax_scale": call.softmax_scale, "layout": call.layout, "groups": current_runtime().cp_group}
    if rows:
        recall = attention_recall(call.query, call.key, call.index, rows=rows, cu_seqlens=call.cu_seqlens, **given)
        of_heads = recall.double().mean((0, 2)).cpu()
    else:
        of_heads = density.new_full((call.query.shape[2],), math.nan)
    worst = int(of_heads.argmin())
    first_head = rank_of("tensor_model_parallel") * len(of_heads)
    return {
        "layer": name,
        "density": float(density.mean()),
        "recall": float(of_heads.mean()),
        "worst_head": first_head + worst,
        "worst_recall": float(of_heads[worst]),
    }


def _worst(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one layer of all tensor-parallel ranks."""
    worst = min(parts, key=lambda part: part["worst_recall"])
    means = {name: sum(part[name] for part in parts) / len(parts) for name in ("density", "recall")}
    return worst | means


def _names(parts: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(part["layer"] for part in parts))
