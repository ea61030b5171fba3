"""Measure what each operation of the CUDA backend costs the host: microseconds until its launches are queued.

python -m tools.host_cost

The inputs are so small that the GPU keeps up. The host's clock runs over calls that nothing waits for; between repeats
it waits. Of all repeats the fastest and the median are printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, select
from megatron_mtraining.arguments import CommandParser
from megatron_mtraining.backends.cuda import cuda_backend
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.commands.stopwatch import Stopwatch
from megatron_mtraining.console import text_table, whole_number
from megatron_mtraining.types import BlockListIndex

SEQ_LEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 512, 16, 2, 128
CALLS = 50
"""Calls in a repeat: their kernels fit into the GPU's queue, so the host never waits for room."""


def operations() -> dict[str, Callable[[], object]]:
    """Return the steps of a layer, by name; those of a ring's later steps continue earlier results."""
    query, grad_out = (torch.randn(1, SEQ_LEN, NUM_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    key, value = (torch.randn(1, SEQ_LEN, NUM_KV_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    geometry = BlockGeometry.whole(seq_len=SEQ_LEN, block_size=64)
    lists = [[[0, 1, 70]] * NUM_HEADS], [[[0, 1, 3]] * NUM_HEADS]
    index = VerticalSlashIndex.from_lists(*lists, seq_len=SEQ_LEN, device="cuda")
    blocks = BlockListIndex.from_lists([[[[0, i] if i else [0] for i in range(SEQ_LEN // 64)]] * NUM_HEADS]).to("cuda")
    backend, held, options = cuda_backend(), (query, key, value), {"softmax_scale": 0.1, "is_last": False}
    packed = backend.pack(key, value, index, geometry)
    result = backend.forward(*held, index, geometry, packed=packed, **options)
    delta = backend.softmax_delta(grad_out, query, None)
    given = (grad_out, *held)
    of_rows = (result.lse, delta)
    first = options | {"packed": packed}
    grad_query, grad_kv, grad_packed = backend.backward(*given, *of_rows, index, geometry, **first)
    unpack_options = {"grad_kv": grad_kv, "dtype": query.dtype}
    resumed = options | {"previous": result}
    later = options | {"previous": grad_query}
    keys_first = later | {"on_kv_gradients": lambda *grads: None}
    config = MTrainingConfig.algorithm_1(dense_below=64, max_vertical=64, max_slash=4)
    return {
        "pack": lambda: backend.pack(key, value, index, geometry),
        "forward, first step": lambda: backend.forward(*held, index, geometry, **first),
        "forward, later step": lambda: backend.forward(*held, index, geometry, **resumed),
        "forward, block lists": lambda: backend.forward(*held, blocks, geometry, **resumed),
        "softmax_delta": lambda: backend.softmax_delta(grad_out, query, None),
        "backward, first step": lambda: backend.backward(*given, *of_rows, index, geometry, **first),
        "backward, later step": lambda: backend.backward(*given, *of_rows, index, geometry, **later),
        "backward, block lists": lambda: backend.backward(*given, *of_rows, blocks, geometry, **later),
        "backward, keys first": lambda: backend.backward(*given, *of_rows, index, geometry, **keys_first),
        "unpack": lambda: backend.unpack(grad_packed, index, geometry, **unpack_options),
        "select": lambda: select(query, key, config),
    }


def host_us(call: Callable[[], object], *, repeats: int) -> list[float]:
    """Return microseconds of the host for one call, of each repeat."""
    call()
    host, device = (Stopwatch(torch.device(name)) for name in ("cpu", "cuda"))
    samples = []
    for _ in range(repeats):
        device.settle()
        begin = host.mark()
        for _ in range(CALLS):
            call()
        samples.append(1e3 * host.ms(begin, host.mark()) / CALLS)
    device.settle()
    return samples


def main() -> None:
    """Print a line for each operation."""
    parser = CommandParser(prog="python -m tools.host_cost", description=__doc__)
    parser.add_argument("--repeats", type=whole_number(1, 10**4), default=9)
    repeats = parser.parse_args().repeats
    if not torch.cuda.is_available():
        parser.error("it needs a GPU, and torch finds none.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds of the host")
    rows = []
    with torch.no_grad():
        for name, call in operations().items():
            samples = host_us(call, repeats=repeats)
            rows.append([name, f"{min(samples):.1f}", f"{statistics.median(samples):.1f}"])
    print("\n".join(text_table(("operation", "fastest", "median"), rows)))


if __name__ == "__main__":
    main()
