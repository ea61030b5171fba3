"""What every transport must do, written once: threads and processes, gloo and NCCL run the same checks."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from megatron_mtraining.transport import Transport

MOVED_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
)
SUMMED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
SHAPES = ((), (1,), (3,), (2, 3, 5), (4, 0))


def check_transport(transport: Transport, device: str = "cpu") -> None:
    """Every operation, over dtypes and odd shapes; small integers, so that every sum is exact in every dtype."""
    for shape in SHAPES:
        for dtype in MOVED_DTYPES:
            check_exchange(transport, shape, dtype, device)
            check_all_gather(transport, shape, dtype, device)
            check_all_to_all(transport, shape, dtype, device)
        for dtype in SUMMED_DTYPES:
            check_all_reduce(transport, shape, dtype, device)
            check_reduce_scatter(transport, shape, dtype, device)
    check_noncontiguous(transport, device)
    check_shifted(transport, device)
    check_assemble(transport, device)


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: str, salt: int = 0) -> Tensor:
    """What ``rank`` has: everybody can tell."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype).to(device)


def check_exchange(transport: Transport, shape, dtype, device) -> None:
    mine = [numbers(transport.rank, shape, dtype, device, salt) for salt in (0, 1)]
    kept = [tensor.clone() for tensor in mine]
    pending = [transport.exchange(tensor) for tensor in mine]
    received = [posted.wait() for posted in pending]
    before = (transport.rank - 1) % transport.size
    for salt, tensor in enumerate(received):
        assert_same(tensor, numbers(before, shape, dtype, device, salt))
    for tensor, copy in zip(mine, kept, strict=True):
        assert_same(tensor, copy)


def check_all_gather(transport: Transport, shape, dtype, device) -> None:
    mine = numbers(transport.rank, shape, dtype, device)
    posted = [transport.post_all_gather(mine) for _ in range(2)]
    for gathered in (transport.all_gather(mine), *(each.wait() for each in posted)):
        assert_same(gathered, torch.stack([numbers(rank, shape, dtype, device) for rank in range(transport.size)]))


def check_all_to_all(transport: Transport, shape, dtype, device) -> None:
    def row(rank: int) -> Tensor:
        return numbers(rank, (transport.size, *shape), dtype, device)

    received = transport.all_to_all(row(transport.rank))
    assert_same(received, torch.stack([row(rank)[transport.rank] for rank in range(transport.size)]))


def check_all_reduce(transport: Transport, shape, dtype, device) -> None:
    everybody = torch.stack([numbers(rank, shape, dtype, device) for rank in range(transport.size)])
    for op, want in (("sum", everybody.sum(0).to(dtype)), ("max", everybody.amax(0))):
        mine = numbers(transport.rank, shape, dtype, device)
        assert transport.all_reduce(mine, op=op) is mine
        assert_same(mine, want)
    mine = numbers(transport.rank, shape, dtype, device)
    posted = transport.post_all_reduce(mine)
    assert posted.wait() is mine
    assert_same(mine, everybody.sum(0).to(dtype))


def check_reduce_scatter(transport: Transport, shape, dtype, device) -> None:
    everybody = [numbers(rank, (transport.size, *shape), dtype, device) for rank in range(transport.size)]
    posted = [transport.post_reduce_scatter(everybody[transport.rank]) for _ in range(2)]
    for each in posted:
        assert_same(each.wait(), torch.stack(everybody).sum(0)[transport.rank].to(dtype))


def check_noncontiguous(transport: Transport, device) -> None:
    """Transposed tensors travel by value, and operations in place reach the caller's memory."""
    before = (transport.rank - 1) % transport.size
    mine = numbers(transport.rank, (3, 4), torch.float32, device).T
    assert_same(transport.exchange(mine).wait(), numbers(before, (3, 4), torch.float32, device).T)
    assert_same(transport.all_gather(mine)[before], numbers(before, (3, 4), torch.float32, device).T)
    base = torch.ones(3, 4, device=device)
    transport.all_reduce(base.T)
    assert_same(base, torch.full((3, 4), float(transport.size), device=device))


def check_shifted(transport: Transport, device) -> None:
    """On one rank the same numbers lie two bytes beside a word, where no view of words can begin; by value."""
    shift = int(transport.rank == 0)
    mine = torch.arange(9, dtype=torch.bfloat16, device=device).sub_(shift)[shift:][:8]
    assert_same(transport.all_gather(mine)[-1], mine)
    assert_same(transport.post_all_gather(mine).wait()[0], mine)
    assert_same(transport.exchange(mine).wait(), mine)
    rows = mine[:1].repeat(transport.size + 1)[shift:][: transport.size]
    assert_same(transport.all_to_all(rows), rows)
    whole = mine.clone()
    assert_same(transport.assemble(mine if transport.rank == 0 else mine.mul_(0)), whole)


def check_assemble(transport: Transport, device) -> None:
    """Bit patterns that arithmetic would not keep: signalling and quiet NaN payloads, -0, denormals, infinities."""
    patterns = {
        torch.float64: ("<q", [0x7FF0000000000001, 0x7FF8DEADBEEF0000, -0x8000000000000000, 1, 0x7FF0000000000000]),
        torch.float32: ("<i", [0x7F800001, 0x7FC0BEEF, -0x80000000, 1, 0x7F800000]),
        torch.bfloat16: ("<h", [0x7F81, 0x7FC5, -0x8000, 1, 0x7F80]),
        torch.float16: ("<h", [0x7C01, 0x7E55, -0x8000, 1, 0x7C00]),
    }
    for dtype, (code, integers) in patterns.items():
        for count in (5, 6):
            whole = b"".join(struct.pack(code, integers[i % 5]) for i in range(count))
            full = torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device).view(dtype)
            mine = torch.zeros_like(full)
            mine.view(torch.uint8).view(count, -1)[transport.rank :: transport.size] = full.view(torch.uint8).view(
                count, -1
            )[transport.rank :: transport.size]
            assert transport.assemble(mine) is mine
            assert torch.equal(mine.view(torch.uint8), full.view(torch.uint8))


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal in dtype, shape and value."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(got, want), (got, want)
