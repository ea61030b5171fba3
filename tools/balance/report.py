"""The table of replays as text and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_mtraining.planner.profile import Profile

from .replay import Replay

COLUMNS = (
    f"{'layout':<14}{'schedule':<14}{'verticals':<10}{'worker':>7}{'step':>7}{'lockstep':>9}"
    f"{'inner MB':>12}{'outer MB':>12}{'fwd ms':>9}{'bwd ms':>9}{'waiting':>9}{'host fwd':>10}{'bwd':>8}"
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
    yield COLUMNS
    for replay in replays:
        yield table_line(replay)


def table_line(replay: Replay) -> str:
    """Return the line of one replay."""
    forward, backward = replay.prediction.forward, replay.prediction.backward
    inner, outer = (
        f"{getattr(forward, name) / 1e6:.0f}/{getattr(backward, name) / 1e6:.0f}"
        for name in ("inner_bytes", "outer_bytes")
    )
    work = replay.work
    return (
        f"{replay.layout:<14}{replay.ring.kind:<14}{replay.verticals:<10}{work.worker_imbalance:>7.3f}"
        f"{float(work.imbalance_of_steps.max()):>7.2f}{work.step_imbalance:>9.3f}{inner:>12}{outer:>12}"
        f"{forward.gpu_ms:>9.2f}{backward.gpu_ms:>9.2f}{forward.exposed_ms + backward.exposed_ms:>9.2f}"
        f"{forward.host_ms:>10.2f}{backward.host_ms:>8.2f}"
    )


def ablation_lines(ablation: Sequence[tuple[str, Replay]]) -> Iterator[str]:
    """Yield times beside those of the first row: of the GPU where hosts are ahead, and of the slower of the two."""
    first = ablation[0][1].prediction
    yield f"\nAblation, W {ablation[0][1].ring.cp_size}: one layer's attention, forward and backward"
    width = max(len(name) for name, _ in ablation)
    for name, replay in ablation:
        gpu_ms, ms = replay.prediction.gpu_ms, replay.prediction.ms
        yield (
            f"{name:<{width}}  GPU {gpu_ms:8.2f} ms {gpu_ms / first.gpu_ms:6.2f}x"
            f"   with its host {ms:8.2f} ms {ms / first.ms:6.2f}x"
            f"   worker {replay.work.worker_imbalance:.3f}, lockstep {replay.work.step_imbalance:.3f}"
        )


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
        "replays": [replay.figures() for replay in replays],
        "ablation": [{"name": name, **replay.figures()} for name, replay in ablation],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1) + "\n")
