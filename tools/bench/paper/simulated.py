"""32 ranks on four nodes that nobody has here: the paper's size, from a replay of a recorded index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_mtraining.commands.balance.replay import GATHERED, Replay, Replayer
from megatron_mtraining.metrics import Recording
from megatron_mtraining.planner.clock import CallSizes
from megatron_mtraining.planner.profile import PROFILES

from ..problem import Problem

RANKS, NODE_SIZE = 32, 8
INNER_GB_S, OUTER_GB_S = 300, 25
TOKENS = 524288
RECORDED = Path(__file__).parents[1] / "data" / "tiny_gpt.json"
PAPER = {"worker": 2.1, "lockstep": 2.2}
"""Factors by which the paper measures its imbalance of ranks and of steps to be better than zigzag's."""

ROWS = (
    ("mtraining", "striped", "hierarchical"),
    ("node_striped", "node_striped", "hierarchical"),
    ("node_striped, gather", "node_striped", "gather"),
    ("w/ ZigZag", "zigzag", "hierarchical"),
    ("w/o hierarchical", "striped", "flat"),
)


def simulated_rows(problem: Problem, *, seq_len: int = TOKENS) -> Iterator[dict[str, Any]]:
    """Yield a row for each method, and dense attention last; ``over_zigzag`` is zigzag's imbalance over the row's.

    The index is a recorded model's, its runs scattered over the longer sequence; verticals are gathered once.
    """
    scatter = torch.Generator().manual_seed(0)
    index = Recording.load(RECORDED).index(seq_len=seq_len, num_heads=problem.num_heads, scatter=scatter)
    sizes = CallSizes(
        seq_len=seq_len,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
    )
    profile = replace(PROFILES["h200"], inner_gb_s=INNER_GB_S, outer_gb_s=OUTER_GB_S)
    replayer = Replayer(index=index, sizes=sizes, profile=profile, node_size=NODE_SIZE)
    replays = {name: _gathered(replayer, layout, schedule) for name, layout, schedule in ROWS}
    zigzag = replays["w/ ZigZag"].work
    replays["dense, ZigZag"] = replayer.dense(RANKS, layout="zigzag", schedule="hierarchical")
    for name, replay in replays.items():
        work = replay.work
        is_sparse = name != "dense, ZigZag"
        yield {
            "method": name,
            "tokens": seq_len,
            **replay.numbers(),
            "worker_over_zigzag": zigzag.worker_imbalance / work.worker_imbalance if is_sparse else None,
            "lockstep_over_zigzag": zigzag.step_imbalance / work.step_imbalance if is_sparse else None,
        }


def _gathered(replayer: Replayer, layout: str, schedule: str) -> Replay:
    return next(each for each in replayer.replays(RANKS, [layout], [schedule]) if each.verticals == GATHERED)
