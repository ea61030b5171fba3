"""Rates of a rank: its links, attention, products, memory, selection, and what the host of its launches takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ...attention import select, sparse_attention
from ...backends.geometry import BlockGeometry
from ...backends.protocol import AttentionBackend
from ...backends.resolve import resolve_backend
from ...config import MTrainingConfig
from ...layout import SequenceLayout
from ...metrics import backward_flops, computed_pairs, forward_flops
from ...metrics.indices import drawn_index
from ...transport import RingGroups, Transport, as_transport
from ...types import VerticalSlashIndex
from ..stopwatch import Stopwatch
from ..trace.emulated_ring import groups_of_large_ring

BLOCK = 64
SCALE = 0.1
DENSITIES = (0.02, 0.1)
"""Of two indices of distances alone, whose difference has the rate without what a call costs beside its pairs."""

HOST_CALLS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of what is computed: long enough that its time is that of its work."""

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_vertical: int
    step_len: int  # tokens of a rank whose ring step is timed
    host_len: int  # and of one whose launches are: so few that the device keeps up
    matrix: tuple[int, int, int]
    num_bytes: int  # of what is read, written and copied
    num_parameters: int  # of the host's optimizer
    repeats: int
    busy_s: float  # for how long the device computes before its rate is measured

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """Return those of a GPU, or small ones that show on a CPU that all works."""
        if device.type == "cuda":
            return cls(
                seq_len=131072,
                num_heads=16,
                num_kv_heads=2,
                head_dim=128,
                num_vertical=1024,
                step_len=16384,
                host_len=512,
                matrix=(16384, 4096, 8192),
                num_bytes=1 << 28,
                num_parameters=1 << 26,
                repeats=9,
                busy_s=0.5,
            )
        return cls(
            seq_len=1024,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            num_vertical=64,
            step_len=256,
            host_len=128,
            matrix=(128, 128, 128),
            num_bytes=1 << 22,
            num_parameters=1 << 16,
            repeats=3,
            busy_s=0.0,
        )


class Timer:
    """Median times of calls, on the device and on its host; :meth:`seconds` times all ranks at once."""

    def __init__(self, stopwatch: Stopwatch, repeats: int, busy_s: float) -> None:
        self.stopwatch, self._repeats, self._busy_s = stopwatch, repeats, busy_s

    def seconds(self, call: Callable[[], object]) -> float:
        """Return what a call takes the device, with nothing of it in the caches."""
        call()
        return statistics.median(self._once(call) for _ in range(self._repeats))

    def busy_seconds(self, call: Callable[[], object]) -> float:
        """Return what a call takes a device that has computed the same for a while, as in training.

        At its power limit a card is slower than after a pause.
        """
        call()
        for _ in range(math.ceil(self._busy_s / self._once(call))):
            call()
        marks = [self.stopwatch.mark()]
        for _ in range(self._repeats):
            call()
            marks.append(self.stopwatch.mark())
        self.stopwatch.settle()
        return 1e-3 * statistics.median(self.stopwatch.ms(*each) for each in pairwise(marks))

    def host_seconds(self, call: Callable[[], object]) -> float:
        """Return what it takes to launch a call, with nothing to wait for."""
        host, samples = Stopwatch(torch.device("cpu")), []
        call()
        for _ in range(self._repeats):
            self.stopwatch.settle()
            begin = host.mark()
            for _ in range(HOST_CALLS):
                call()
            samples.append(1e-3 * host.ms(begin, host.mark()) / HOST_CALLS)
        self.stopwatch.settle()
        return statistics.median(samples)

    def _once(self, call: Callable[[], object]) -> float:
        self.stopwatch.begin()
        begin = self.stopwatch.mark()
        call()
        end = self.stopwatch.mark()
        self.stopwatch.settle()
        return 1e-3 * self.stopwatch.ms(begin, end)


def link_rates(groups: RingGroups, timer: Timer) -> dict[str, float]:
    """Time exchanges of two sizes between all neighbours of a level at once; nothing of a level that has one rank.

    A ring sends as much and as this, key by key; a size's time less the latency is that of its bytes.
    """
    device, found = timer.stopwatch.device, {}
    sizes = (1 << 20, 1 << 26) if device.type == "cuda" else (1 << 16, 1 << 20)
    for level in ("inner", "outer"):
        transport = as_transport(getattr(groups, level))
        if transport.size == 1:
            continue
        small, large = (
            timer.seconds(partial(_exchange, transport, sent))
            for sent in (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for num_bytes in sizes)
        )
        per_byte = (large - small) / (sizes[1] - sizes[0])
        per_byte = per_byte if per_byte > 0 else large / sizes[1]
        found[f"{level}_gb_s"] = 1e-9 / per_byte
        found[f"{level}_latency_us"] = 1e6 * max(small - per_byte * sizes[0], 0.0)
    return found


def _exchange(transport: Transport, sent: Tensor) -> Tensor:
    return transport.exchange(sent).wait()


def kernel_rates(sizes: Sizes, timer: Timer) -> dict[str, float]:
    """Measure attention, whole calls and ring steps, dense attention and selection."""
    device = timer.stopwatch.device
    query, key, value, grad_out = _tensors(sizes, sizes.seq_len, device)
    leaves = tuple(each.requires_grad_() for each in (query, key, value))
    found: dict[str, float] = {}

    def times_of(index: VerticalSlashIndex) -> tuple[float, float]:
        on_device = index.to(device)
        out = sparse_attention(*leaves, index=on_device).out
        return (
            timer.busy_seconds(lambda: sparse_attention(*leaves, index=on_device).out),
            timer.busy_seconds(lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)),
        )

    few, many, both = (_drawn(sizes, sizes.seq_len, *caps) for caps in ((0, 0), (0, 1), (sizes.num_vertical, 1)))
    times = [times_of(index) for index in (few, many, both)]
    pairs = [_pairs(index, sizes.seq_len) for index in (few, many, both)]
    for number, (direction, flops) in enumerate((("forward", forward_flops), ("backward", backward_flops))):
        rates = [
            _tflops(flops(pairs[second] - pairs[first], head_dim=sizes.head_dim), times[second][number], before)
            for first, second, before in ((0, 1, times[0][number]), (1, 2, times[1][number]))
        ]
        found[f"slash_{direction}_tflops"] = rates[0] or _tflops(
            flops(pairs[1], head_dim=sizes.head_dim), times[1][number]
        )
        found[f"vertical_{direction}_tflops"] = rates[1] or found[f"slash_{direction}_tflops"]
    found |= _step_costs(sizes, timer, found)
    found |= _dense_rates(sizes, timer)
    config = MTrainingConfig(dense_below=0)
    seconds = timer.busy_seconds(lambda: select(query.detach(), key.detach(), config))
    rows = min(config.num_probe_rows, sizes.seq_len)
    found["selection_gpairs_s"] = rows * sizes.seq_len * sizes.num_heads / seconds / 1e9
    return found


def machine_rates(sizes: Sizes, timer: Timer) -> dict[str, float]:
    """Measure products, memory, copies from the host, and the host's optimizer, of all ranks at once."""
    device = timer.stopwatch.device
    rows, inner, columns = sizes.matrix
    tokens, weight, grad_out = (
        torch.randn(*each, device=device).bfloat16() for each in ((rows, inner), (columns, inner), (rows, columns))
    )

    def products() -> tuple[Tensor, Tensor, Tensor]:
        """Return those of a linear layer in a step: forward, and both of its backward."""
        return tokens @ weight.T, grad_out @ weight, grad_out.T @ tokens

    found = {"gemm_tflops": _tflops(6 * rows * inner * columns, timer.busy_seconds(products))}
    first, second = (torch.ones(sizes.num_bytes // 4, device=device) for _ in range(2))
    result = torch.empty_like(first)
    seconds = timer.busy_seconds(lambda: torch.add(first, second, out=result))
    found["memory_gb_s"] = 3 * sizes.num_bytes / seconds / 1e9
    host = torch.ones(sizes.num_bytes // 4)
    host = host.pin_memory() if device.type == "cuda" else host
    seconds = timer.seconds(lambda: result.copy_(host, non_blocking=True))
    found["host_gb_s"] = sizes.num_bytes / seconds / 1e9
    parameter = torch.nn.Parameter(torch.zeros(sizes.num_parameters))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter], foreach=True)
    seconds = Timer(Stopwatch(torch.device("cpu")), sizes.repeats, 0.0).seconds(optimizer.step)
    found["host_adam_gparams_s"] = sizes.num_parameters / seconds / 1e9
    if device.type == "cuda":
        found["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
    return found


def host_costs(sizes: Sizes, timer: Timer, present: RingGroups, num_ranks: int) -> dict[str, float]:
    """Measure what launches take the host: rings of two lengths, emulated, have the cost of a step between them."""
    lengths = (2 * num_ranks, 4 * num_ranks)
    times = {size: _layer_seconds(sizes, timer, present, size) for size in lengths}
    found = {}
    for number, direction in enumerate(("forward", "backward")):
        short, long = (times[size][number] for size in lengths)
        step = max(long - short, 0.0) / (lengths[1] - lengths[0])
        found[f"host_{direction}_step_us"] = 1e6 * step
        found[f"host_{direction}_us"] = 1e6 * max(short - lengths[0] * step, 0.0)
    return found


def _layer_seconds(sizes: Sizes, timer: Timer, present: RingGroups, size: int) -> tuple[float, float]:
    """Return seconds of the host for selection and forward, and for a backward, in a ring of ``size``."""
    device, seq_len = timer.stopwatch.device, size * sizes.host_len
    config = MTrainingConfig(schedule="flat", dense_below=0)
    ring = {
        "layout": SequenceLayout("striped", seq_len=seq_len, cp_size=size),
        "groups": groups_of_large_ring(present, size=size, inner_size=size),
    }
    *leaves, grad_out = _tensors(sizes, sizes.host_len, device)
    leaves = tuple(each.requires_grad_() for each in leaves)
    index = drawn_index(seq_len, num_heads=sizes.num_heads, max_vertical=sizes.num_vertical, max_slash=1).to(device)

    def forward() -> Tensor:
        select(leaves[0].detach(), leaves[1].detach(), config, **ring)
        return sparse_attention(*leaves, config, index=index, **ring).out

    launched = timer.host_seconds(forward)
    both = timer.host_seconds(lambda: torch.autograd.grad(forward(), leaves, grad_out))
    return launched, max(both - launched, 0.0)


def _step_costs(sizes: Sizes, timer: Timer, rates: dict[str, float]) -> dict[str, float]:
    """Return what a later ring step takes the device beside its pairs, of which it has a diagonal's."""
    device, length = timer.stopwatch.device, sizes.step_len
    query, key, value, grad_out = _tensors(sizes, length, device)
    backend: AttentionBackend = resolve_backend(
        "auto", device=device, dtype=query.dtype, head_dim=sizes.head_dim, block_size=BLOCK
    )
    index = VerticalSlashIndex.from_lists(
        [[[0]] * sizes.num_heads], [[[0]] * sizes.num_heads], seq_len=length, block_size=BLOCK
    )
    geometry, options = BlockGeometry.whole(seq_len=length, block_size=BLOCK), {"softmax_scale": SCALE}
    pairs = _pairs(index, length)
    index = index.to(device)
    with torch.no_grad():
        packed = backend.pack(key, value, index, geometry)
        step = options | {"is_last": False}
        first = backend.forward(query, key, value, index, geometry, packed=packed, **step)
        delta = backend.softmax_delta(grad_out, query, None)
        given = grad_out, query, key, value, first.lse, delta, index, geometry
        grad_query, *_ = backend.backward(*given, packed=packed, **step)
        forward = timer.seconds(lambda: backend.forward(query, key, value, index, geometry, previous=first, **step))
        backward = timer.seconds(
            lambda: backend.backward(*given, previous=grad_query, on_kv_gradients=lambda *_: None, **step)
        )
    found = {}
    for direction, seconds, flops in (("forward", forward, forward_flops), ("backward", backward, backward_flops)):
        of_pairs = flops(pairs, head_dim=sizes.head_dim) / (1e12 * rates[f"slash_{direction}_tflops"])
        found[f"gpu_{direction}_step_us"] = 1e6 * max(seconds - of_pairs, 0.0)
    return found


def _dense_rates(sizes: Sizes, timer: Timer) -> dict[str, float]:
    """Return the rates of torch's dense causal attention, keys repeated for each query head."""
    length = sizes.step_len
    query, key, value, grad_out = (
        each.transpose(1, 2).contiguous() for each in _tensors(sizes, length, timer.stopwatch.device)
    )
    groups = sizes.num_heads // sizes.num_kv_heads
    leaves = [each.requires_grad_() for each in (query, key.repeat_interleave(groups, 1))]
    leaves.append(value.repeat_interleave(groups, 1).requires_grad_())
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(*leaves, is_causal=True)
    forward = timer.busy_seconds(lambda: attend(*leaves, is_causal=True))
    backward = timer.busy_seconds(lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True))
    pairs = sizes.num_heads * length * (length + 1) // 2
    return {
        "dense_forward_tflops": _tflops(forward_flops(pairs, head_dim=sizes.head_dim), forward),
        "dense_backward_tflops": _tflops(backward_flops(pairs, head_dim=sizes.head_dim), backward),
    }


def _tensors(sizes: Sizes, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random query, key, value and gradient of the output, bfloat16 ``[1, length, heads, head_dim]``."""
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads, sizes.num_heads)
    return tuple(torch.randn(1, length, each, sizes.head_dim, device=device).bfloat16() for each in heads)


def _drawn(sizes: Sizes, seq_len: int, num_vertical: int, dense: int) -> VerticalSlashIndex:
    max_slash = max(1, round(DENSITIES[dense] * seq_len / BLOCK))
    return drawn_index(seq_len, num_heads=sizes.num_heads, max_vertical=num_vertical, max_slash=max_slash)


def _pairs(index: VerticalSlashIndex, seq_len: int) -> int:
    return int(computed_pairs(index, seq_len=seq_len).sum())


def _tflops(flops: float, seconds: float, before: float = 0.0) -> float:
    """Return 10**12 operations a second beyond ``before``; 0 where noise is larger than the difference."""
    return flops / (seconds - before) / 1e12 if seconds > 1.05 * before else 0.0
