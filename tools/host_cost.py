"""What each operation of the CUDA backend costs the host: microseconds until its launches are queued.

python -m tools.host_cost

The inputs are so small that the GPU keeps up. The host's clock runs over calls that nothing waits for; between rounds
it waits. Of all rounds the fastest and the median are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, select
from megatron_mtraining.backends.cuda import cuda_backend
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.types import BlockListIndex

SEQ_LEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 512, 16, 2, 128
CALLS = 50
"""In a round: their kernels fit into the GPU's queue, so the host never waits for room."""


def operations() -> dict[str, Callable[[], object]]:
    """The steps of a layer, by name; those of a ring's further steps go on from earlier results."""
    query, grad_out = (torch.randn(1, SEQ_LEN, NUM_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    key, value = (torch.randn(1, SEQ_LEN, NUM_KV_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    geometry = BlockGeometry.whole(seq_len=SEQ_LEN, block_size=64)
    lists = [[[0, 1, 70]] * NUM_HEADS], [[[0, 1, 3]] * NUM_HEADS]
    index = VerticalSlashIndex.from_lists(*lists, seq_len=SEQ_LEN, device="cuda")
    blocks = BlockListIndex.from_lists([[[[0, i] if i else [0] for i in range(SEQ_LEN // 64)]] * NUM_HEADS]).to("cuda")
    backend, held, options = cuda_backend(), (query, key, value), {"softmax_scale": 0.1, "is_last": False}
    packed = backend.pack_vertical(key, value, index, geometry)
    result = backend.forward(*held, packed, index, geometry, **options)
    delta = backend.softmax_delta(grad_out, query, None)
    given = (grad_out, *held)
    grad_query, grad_keys, grad_packed = backend.backward(*given, packed, result.lse, delta, index, geometry, **options)
    home = {"grad_keys": grad_keys, "dtype": query.dtype}
    resumed = options | {"previous": result}
    keys_first = options | {"previous": grad_query, "on_key_gradients": lambda *grads: None}
    config = MTrainingConfig(dense_below=64, max_vertical=64, max_slash=4)
    of_rows = (result.lse, delta)
    return {
        "pack_vertical": lambda: backend.pack_vertical(key, value, index, geometry),
        "forward": lambda: backend.forward(*held, packed, index, geometry, **options),
        "slash_forward": lambda: backend.slash_forward(*held, index, geometry, **resumed),
        "slash_forward, block lists": lambda: backend.slash_forward(*held, blocks, geometry, **resumed),
        "softmax_delta": lambda: backend.softmax_delta(grad_out, query, None),
        "backward": lambda: backend.backward(*given, packed, *of_rows, index, geometry, **options),
        "slash_backward": lambda: backend.slash_backward(
            *given, *of_rows, index, geometry, previous=grad_query, **options
        ),
        "slash_backward, block lists": lambda: backend.slash_backward(
            *given, *of_rows, blocks, geometry, previous=grad_query, **options
        ),
        "slash_backward, keys first": lambda: backend.slash_backward(*given, *of_rows, index, geometry, **keys_first),
        "unpack_vertical_grad": lambda: backend.unpack_vertical_grad(grad_packed, index, geometry, **home),
        "select": lambda: select(query, key, config),
    }


def host_us(call: Callable[[], object], *, rounds: int) -> list[float]:
    """Microseconds of the host for one call, of each round."""
    call()
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return samples


def main() -> None:
    """Prints a line for each operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        parser.error("it needs a GPU, and torch finds none.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds of the host: fastest, median")
    with torch.no_grad():
        for name, call in operations().items():
            samples = host_us(call, rounds=rounds)
            print(f"{name:28s} {min(samples):7.1f} {statistics.median(samples):7.1f}", flush=True)


if __name__ == "__main__":
    main()
