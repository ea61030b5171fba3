"""Rate and latency of a rank's links, by level: inside its node and between nodes."""

from __future__ import annotations

import torch

from ...transport import RingGroups, as_transport
from .kernels import Timer

LEVELS = ("inner", "outer")


def link_rates(groups: RingGroups, timer: Timer) -> dict[str, float]:
    """Time exchanges of two sizes between all neighbours of a level at once; nothing of a level that has one rank.

    A ring sends as much and as this, key by key; a size's time less the latency is that of its bytes.
    """
    device, found = timer.stopwatch.device, {}
    sizes = (1 << 20, 1 << 26) if device.type == "cuda" else (1 << 16, 1 << 20)
    for level in LEVELS:
        transport = as_transport(getattr(groups, level))
        if transport.size == 1:
            continue
        small, large = (
            timer.seconds(lambda sent=sent: transport.exchange(sent).wait())
            for sent in (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for num_bytes in sizes)
        )
        per_byte = (large - small) / (sizes[1] - sizes[0])
        per_byte = per_byte if per_byte > 0 else large / sizes[1]
        found[f"{level}_gb_s"] = 1e-9 / per_byte
        found[f"{level}_latency_us"] = 1e6 * max(small - per_byte * sizes[0], 0.0)
    return found
