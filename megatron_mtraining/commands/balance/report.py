"""The table of replays as text and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ...console import text_table
from ...planner.profile import Profile
from .layers import LayerReplayer
from .replay import Replay

HEADINGS = (
    *("layout", "schedule", "verticals", "worker", "step", "lockstep", "inner MB", "outer MB"),
    *("fwd ms", "bwd ms", "waiting", "host fwd", "bwd"),
)

LEGEND = """\
worker: busiest rank / mean rank of all useful pairs. step: busiest / mean rank of the worst step.
lockstep: the busiest rank of every step, added up / mean rank. MB: 10**6 bytes that the busiest rank sends over its
link inside the node and out of it, forward/backward, gathered verticals included. ms: predicted, of the GPU where hosts
are ahead of it; waiting: of fwd + bwd, what the mean rank does not compute. host: what a host needs to launch fwd, with
its selection, and bwd: where that is more, it decides. token_striped: pairs useful, ms of the whole tiles that its
kernels would issue."""


def table_lines(replays: Sequence[Replay]) -> Iterator[str]:
    """Yield the lines of one number of ranks."""
    ring = replays[0].ring
    in_node = min(ring.node_size, ring.cp_size)
    yield f"\nW {ring.cp_size}: nodes of {in_node}, {ring.cp_size // in_node} of them"
    yield from text_table(HEADINGS, [_cells(replay) for replay in replays])


def _cells(replay: Replay) -> list[str]:
    forward, backward = replay.prediction
    names = [replay.layout, replay.ring.kind, replay.verticals]
    work = replay.work
    counts = [
        f"{work.worker_imbalance:.3f}",
        f"{float(work.imbalance_of_steps.max()):.2f}",
        f"{work.step_imbalance:.3f}",
    ]
    sent = [
        f"{getattr(forward, name) / 1e6:.0f}/{getattr(backward, name) / 1e6:.0f}"
        for name in ("inner_bytes", "outer_bytes")
    ]
    waiting = forward.exposed_ms + backward.exposed_ms
    times = (forward.gpu_ms, backward.gpu_ms, waiting, forward.host_ms, backward.host_ms)
    return [*names, *counts, *sent, *(f"{ms:.2f}" for ms in times)]


def ablation_lines(ablation: Sequence[tuple[str, Replay]]) -> Iterator[str]:
    """Yield times beside those of the first row: of the GPU where hosts are ahead, and of the slower of the two."""
    first = ablation[0][1]
    yield f"\nAblation, W {first.ring.cp_size}: one layer's attention, forward and backward"
    headings = ("", "GPU ms", "ratio", "with its host ms", "ratio", "worker", "lockstep")
    rows = []
    for name, replay in ablation:
        times = (replay.gpu_ms, replay.gpu_ms / first.gpu_ms, replay.ms, replay.ms / first.ms)
        work = (replay.work.worker_imbalance, replay.work.step_imbalance)
        rows.append([name, *(f"{each:.2f}" for each in times), *(f"{each:.3f}" for each in work)])
    yield from text_table(headings, rows)


def write_json(
    path: Path,
    *,
    setting: dict[str, object],
    profile: Profile,
    replays: Sequence[Replay],
    ablation: Sequence[tuple[str, Replay]],
) -> None:
    """Write everything that was printed."""
    entries = {
        **setting,
        "profile": asdict(profile),
        "replays": [replay.numbers() for replay in replays],
        "ablation": [{"name": name, **replay.numbers()} for name, replay in ablation],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1) + "\n")


def write_layers(path: Path, *, setting: dict[str, object], replayer: LayerReplayer) -> Path:
    """Write everything that was counted of layers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**setting, "balances": replayer.numbers()}, indent=1) + "\n")
    return path
