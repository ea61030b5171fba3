"""Runs a function on ranks that are processes of their own, over gloo or NCCL, and survives those that die."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.forkserver import fork_server


class Outcome(NamedTuple):
    """How a rank ended."""

    result: Any = None
    """What its function returned."""

    error: Exception | None = None
    """What its function raised."""

    died: bool = False
    """Whether it ended without a word."""


def outcomes_of_ranks(
    function: Callable[..., Any],
    world_size: int,
    *,
    backend: str = "gloo",
    group_timeout_s: float = 60.0,
    deadline_s: float = 120.0,
    **arguments: Any,
) -> list[Outcome]:
    """Calls ``function(**arguments)``, a module-level function, in ``world_size`` processes that form a job.

    Raises:
        TimeoutError: a rank has not ended ``deadline_s`` after the start.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        job = (backend, world_size, group_timeout_s, str(Path(folder) / "store"))
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_rank_main, args=(sender, rank, job, function, arguments), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for rank, (_, sender) in zip(ranks, pipes, strict=True):
            rank.start()
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], time.monotonic() + deadline_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def run_in_processes(function: Callable[..., Any], world_size: int, **options: Any) -> list[Any]:
    """What each rank returned; raises the error of the lowest rank that has one, with a note that names it."""
    outcomes = outcomes_of_ranks(function, world_size, **options)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            outcome.error.add_note(f"raised on rank {rank}")
            raise outcome.error
        assert not outcome.died, f"rank {rank} died"
    return [outcome.result for outcome in outcomes]


def _collect(receivers: list[Connection], deadline: float) -> list[Outcome]:
    outcomes: dict[Connection, Outcome] = {}
    while len(outcomes) < len(receivers):
        ready = wait(set(receivers) - set(outcomes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            running = [rank for rank, receiver in enumerate(receivers) if receiver not in outcomes]
            raise TimeoutError(f"ranks {running} have not ended in time.")
        for receiver in ready:
            try:
                outcomes[receiver] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                outcomes[receiver] = Outcome(died=True)
    return [outcomes[receiver] for receiver in receivers]


def _rank_main(
    sender: Connection, rank: int, job: tuple[str, int, float, str], function: Callable[..., Any], arguments: dict
) -> None:
    import torch
    import torch.distributed as dist

    backend, world_size, group_timeout_s, store = job
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout_s),
    )
    try:
        outcome = Outcome(result=function(**arguments))
    except Exception as error:
        outcome = Outcome(error=error)
    sender.send_bytes(pickle.dumps(outcome))  # by value: torch's own pickler would share memory that ends with the rank
