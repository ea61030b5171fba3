"""Time a ring's exchange between neighbours on one host: NCCL against copy engines over symmetric memory.

python -m tools.ring_bench                  # every GPU of this machine; about 20 s on two
python -m tools.ring_bench --mebibytes 64   # one size

Each type is timed alone and beside a matrix product that fills the GPU: what the exchange takes then, and by how much
it slows the product down. NCCL moves data with kernels, which need room on the multiprocessors that the product holds;
the copy engines need none. Peer copies read a neighbour's buffer (``get_buffer``); NVLink multicast is never used.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from megatron_mtraining.arguments import CommandParser
from megatron_mtraining.commands.stopwatch import Mark, Stopwatch
from megatron_mtraining.console import text_table
from megatron_mtraining.transport import as_transport, create_ring_groups

MIB = 1 << 20
PRODUCT_DIM = 8192
REPEATS = 10


class NcclExchange:
    """Transport of the package itself: sends and receives on the group's stream."""

    name = "NCCL"

    def __init__(self, num_bytes: int) -> None:
        groups = create_ring_groups([list(range(dist.get_world_size()))], inner_size=dist.get_world_size())
        self._transport = as_transport(groups.inner)
        self.outgoing = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def post(self) -> Callable[[], Tensor]:
        """Begin the exchange; calling the result waits for the received bytes."""
        pending = self._transport.exchange(self.outgoing)
        return pending.wait


class PeerCopyExchange:
    """Copy from the neighbour's symmetric buffer on a stream of its own, between two signals.

    The first signal says that the neighbour's bytes are there, the second that they were fetched, after which it may
    write new ones.
    """

    name = "peer copy"

    def __init__(self, num_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.outgoing = symmetric_memory.empty(
            num_bytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
        )
        self._memory = symmetric_memory.rendezvous(self.outgoing, dist.group.WORLD)
        rank, size = dist.get_rank(), dist.get_world_size()
        self._predecessor, self._successor = (rank - 1) % size, (rank + 1) % size
        self._theirs = self._memory.get_buffer(self._predecessor, (num_bytes,), torch.uint8)
        self._received = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream(priority=-1)

    def post(self) -> Callable[[], Tensor]:
        """Begin the exchange; calling the result waits for the received bytes."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._memory.put_signal(self._successor, 0)
            self._memory.wait_signal(self._predecessor, 0)
            self._received.copy_(self._theirs)
            self._memory.put_signal(self._predecessor, 1)
            self._memory.wait_signal(self._successor, 1)
        return self._arrived

    def _arrived(self) -> Tensor:
        torch.cuda.current_stream().wait_stream(self._stream)
        return self._received


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Milliseconds, the median over repeats of the slowest rank."""

    alone: float
    """Time of the exchange by itself."""

    product: float
    """Time of the matrix products by themselves."""

    both: float
    """Time of the exchange posted first, then the products, then the wait."""

    exchange_beside: float
    """Time until the exchange had ended beside the products."""


def milliseconds(body: Callable[[], Mark | None], stopwatch: Stopwatch) -> float:
    """Return the median time of ``body`` on the current stream, or until the mark it returns; the slowest rank's."""
    times = []
    for _ in range(REPEATS + 3):
        stopwatch.begin()
        start = stopwatch.mark()
        ended = body()
        stop = stopwatch.mark()
        stopwatch.settle()
        times.append(stopwatch.ms(start, ended or stop))
    slowest = torch.tensor(statistics.median(times[3:]), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def timed(exchange: NcclExchange | PeerCopyExchange, stopwatch: Stopwatch) -> Timings:
    """Return all four times of one type of exchange."""
    left, right = (torch.randn(PRODUCT_DIM, PRODUCT_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(left)
    waiting_stream = torch.cuda.Stream()

    def multiply() -> None:
        for _ in range(4):
            torch.mm(left, right, out=product)

    def alone() -> None:
        exchange.post()()

    def both() -> None:
        wait = exchange.post()
        multiply()
        wait()

    def beside() -> Mark:
        wait = exchange.post()
        with torch.cuda.stream(waiting_stream):
            wait()
            ended = stopwatch.mark()
        multiply()
        torch.cuda.current_stream().wait_stream(waiting_stream)
        return ended

    return Timings(
        alone=milliseconds(alone, stopwatch),
        product=milliseconds(multiply, stopwatch),
        both=milliseconds(both, stopwatch),
        exchange_beside=milliseconds(beside, stopwatch),
    )


def check(exchange: NcclExchange | PeerCopyExchange) -> None:
    """Check that every rank receives its predecessor's bytes, twice, new ones the second time."""
    predecessor = (dist.get_rank() - 1) % dist.get_world_size()
    for offset in (1, 100):
        exchange.outgoing.fill_(dist.get_rank() + offset)
        received = exchange.post()()
        assert bool((received == predecessor + offset).all()), f"{exchange.name} brought other bytes"


def run(rank: int, store: str, world_size: int, sizes: tuple[int, ...]) -> None:
    """Run one rank; the first one prints."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    stopwatch = Stopwatch(torch.device("cuda", rank))
    rows = []
    for mebibytes in sizes:
        for exchange_type in (NcclExchange, PeerCopyExchange):
            exchange = exchange_type(mebibytes * MIB)
            check(exchange)
            times = timed(exchange, stopwatch)
            numbers = (
                times.alone,
                mebibytes * MIB / times.alone / 1e6,
                times.product,
                times.both,
                times.exchange_beside,
            )
            rows.append([exchange_type.name, str(mebibytes), *(f"{number:.3f}" for number in numbers)])
    if rank == 0:
        print(f"{world_size} x {torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds")
        headings = ("", "MiB", "alone", "GB/s", "products", "both", "exchange beside")
        print("\n".join(text_table(headings, rows)), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run a process for each GPU."""
    parser = CommandParser(prog="python -m tools.ring_bench", description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--mebibytes", type=int, nargs="+", default=(16, 64, 256))
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error("an exchange needs at least 2 GPUs.")
    if arguments.ranks > torch.cuda.device_count():
        parser.error(f"--ranks must be at most the {torch.cuda.device_count()} GPUs present, got {arguments.ranks}.")
    if min(arguments.mebibytes) < 1:
        parser.error(f"--mebibytes must be at least 1, got {min(arguments.mebibytes)}.")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # rendezvous would set it up otherwise
    with tempfile.TemporaryDirectory() as folder:
        inputs = (f"{folder}/store", arguments.ranks, tuple(arguments.mebibytes))
        torch.multiprocessing.spawn(run, args=inputs, nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
