"""What this GPU and its links do with an index: rates and costs from which a replay predicts a ring."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mtraining.ops.backend import AttentionBackend
from megatron_mtraining.ops.geometry import BlockGeometry
from megatron_mtraining.planner import PROFILES, Profile, rank_pairs
from megatron_mtraining.telemetry import backward_flops, forward_flops
from megatron_mtraining.types import VerticalSlashIndex

from .layer import Place, RingLayer
from .stopwatch import Stopwatch

REPEATS = 5
SMALL_BYTES = 1024
MOST_APART = 4.0
"""How far the rate of verticals, a difference of two times, may lie from that of slashes."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Of one length and number of ranks; milliseconds, the mean over ranks."""

    slash_pairs: float
    """Of one rank's queries and its own keys, as are all that follow but the links."""

    vertical_pairs: float
    slash_forward_ms: float
    forward_ms: float
    slash_backward_ms: float
    backward_ms: float
    empty_forward_ms: float
    """A step without a pair: what comes with its tokens, whatever it keeps."""

    empty_backward_ms: float
    exchange_ms: float
    exchange_bytes: int
    small_exchange_ms: float

    def profile(self, direction: str, *, head_dim: int) -> Profile:
        """The planner's profile for one direction of these calls."""
        flops = forward_flops if direction == "forward" else backward_flops
        empty, slash, both = (getattr(self, f"{kind}{direction}_ms") for kind in ("empty_", "slash_", ""))
        slash_rate = _tflops(flops(self.slash_pairs, head_dim=head_dim), slash - empty)
        vertical_rate = _tflops(flops(self.vertical_pairs, head_dim=head_dim), both - slash)
        vertical_rate = min(max(vertical_rate, slash_rate / MOST_APART), slash_rate * MOST_APART)
        rates = {f"slash_{direction}_tflops": slash_rate, f"vertical_{direction}_tflops": vertical_rate}
        sending_ms = max(self.exchange_ms - self.small_exchange_ms, 1e-6)
        links = {"gb_s": self.exchange_bytes / sending_ms / 1e6, "latency_us": 1e3 * self.small_exchange_ms}
        links = {f"{level}_{name}": value for level in ("inner", "outer") for name, value in links.items()}
        return replace(PROFILES["h200"], **rates, **links, launch_us=1e3 * empty, source="measured in the same run")


def calibrate(layer: RingLayer, index: VerticalSlashIndex, place: Place, stopwatch: Stopwatch) -> Calibration:
    """Times single operations of every rank on its own part. A collective: all ranks do it at once.

    Rates are those of a step on a rank's own keys. An empty step is one on keys that lie behind all queries.
    """
    backend, layout = layer.backend(), layer.layout
    own = layout.blocks(place.rank)
    geometry = BlockGeometry(seq_len=layout.seq_len, block_size=layout.block_size, query_blocks=own, key_blocks=own)
    behind = replace(geometry, seq_len=2 * layout.seq_len, key_blocks=own + layout.num_blocks)
    bodies = _Operations(layer, backend, index)
    times = {
        "slash_forward_ms": bodies.slash_forward(geometry),
        "forward_ms": bodies.forward(geometry),
        "slash_backward_ms": bodies.slash_backward(geometry),
        "backward_ms": bodies.backward(geometry),
        "empty_forward_ms": bodies.slash_forward(behind),
        "empty_backward_ms": bodies.slash_backward(behind),
    }
    key_bytes = 2 * layer.leaves[1].numel() * layer.leaves[1].element_size()
    for name, num_bytes in (("exchange_ms", key_bytes), ("small_exchange_ms", SMALL_BYTES)):
        times[name] = _exchange(place, num_bytes)
    measured = [_median_ms(body, stopwatch) for body in times.values()]
    pairs = rank_pairs(index.to("cpu"), layout)
    own_pairs = [float(pairs.slash[place.rank, place.rank]), float(pairs.vertical[place.rank].sum())]
    mean = torch.tensor([*measured, *own_pairs], dtype=torch.float64, device=place.device)
    dist.all_reduce(mean)
    *measured, slash, vertical = (mean / place.world_size).tolist()
    named = dict(zip(times, measured, strict=True))
    return Calibration(**named, slash_pairs=slash, vertical_pairs=vertical, exchange_bytes=key_bytes)


class _Operations:
    """One backend's operations on a layer's own queries and keys."""

    def __init__(self, layer: RingLayer, backend: AttentionBackend, index: VerticalSlashIndex) -> None:
        self._backend, self._index = backend, index
        self._given = tuple(leaf.detach() for leaf in layer.leaves)
        self._grad_out, self._scale = layer.grad_out, layer.leaves[0].shape[3] ** -0.5
        width = (2, index.rows, index.num_lists, index.vertical.shape[2], layer.leaves[0].shape[3])
        self._packed = torch.zeros(width, dtype=layer.grad_out.dtype, device=layer.grad_out.device)

    def forward(self, geometry: BlockGeometry) -> Callable[[], object]:
        given = (*self._given, self._packed, self._index, geometry)
        return lambda: self._backend.forward(*given, softmax_scale=self._scale, is_last=False)

    def slash_forward(self, geometry: BlockGeometry) -> Callable[[], object]:
        previous = self.forward(geometry)()
        options = {"softmax_scale": self._scale, "previous": previous, "is_last": False}
        return lambda: self._backend.slash_forward(*self._given, self._index, geometry, **options)

    def backward(self, geometry: BlockGeometry) -> Callable[[], object]:
        _, lse = self.forward(geometry)()
        delta = torch.zeros_like(lse)
        given = (self._grad_out, *self._given, self._packed, lse, delta, self._index, geometry)
        return lambda: self._backend.backward(*given, softmax_scale=self._scale, is_last=False)

    def slash_backward(self, geometry: BlockGeometry) -> Callable[[], object]:
        _, lse = self.forward(geometry)()
        lse, delta = lse.nan_to_num(neginf=0.0), torch.zeros_like(lse)
        previous = torch.zeros(self._given[0].shape, dtype=lse.dtype, device=lse.device)
        given = (self._grad_out, *self._given, lse, delta, self._index, geometry)
        options = {"softmax_scale": self._scale, "previous": previous, "is_last": False}
        return lambda: self._backend.slash_backward(*given, **options)


def _exchange(place: Place, num_bytes: int) -> Callable[[], Tensor]:
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=place.device)
    ring = place.rings("flat").inner
    return lambda: ring.exchange(sent).wait()


def _median_ms(body: Callable[[], object], stopwatch: Stopwatch) -> float:
    return statistics.median(_times(body, stopwatch))


def _times(body: Callable[[], object], stopwatch: Stopwatch) -> Iterator[float]:
    body()
    for _ in range(REPEATS):
        stopwatch.begin()
        first = stopwatch.mark()
        body()
        second = stopwatch.mark()
        stopwatch.settle()
        yield stopwatch.ms(first, second)


def _tflops(flops: float, ms: float) -> float:
    """Useful TFLOP/s; a time below the clock's grain counts as a microsecond."""
    return max(flops, 1.0) / max(ms, 1e-3) / 1e9


def as_entries(calibration: Calibration) -> dict[str, float]:
    """For a file."""
    return asdict(calibration)
