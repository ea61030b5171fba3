"""Runs a function on several ranks, each a process of its own: on GPUs where there are enough, else on the CPU."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from tests.forkserver import fork_server

TIMEOUT = timedelta(seconds=90)


def run_on_ranks(function: Callable[..., Any], world_size: int, **arguments: Any) -> list[Any]:
    """``function(**arguments)`` on each rank of a job of ``world_size``, and what each returned, in rank order.

    Args:
        function: a module-level function; finds its rank through ``torch.distributed``.
        world_size: number of ranks.
        arguments: picklable keywords.

    Raises:
        RuntimeError: a rank failed; the message holds its traceback.
    """
    context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else fork_server()
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file: a free port may be taken before they bind it
        entry = functools.partial(_rank_main, function, arguments, world_size, f"{folder}/store", has_gpus(world_size))
        with ProcessPoolExecutor(max_workers=world_size, mp_context=context) as pool:
            outcomes = list(pool.map(entry, range(world_size)))
    failures = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(outcomes) if failed]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [result for _, result in outcomes]


def has_gpus(world_size: int) -> bool:
    """Whether a job of ``world_size`` ranks runs on GPUs here."""
    return torch.cuda.device_count() >= world_size


def _rank_main(
    function: Callable[..., Any], arguments: dict[str, Any], world_size: int, store: str, on_gpu: bool, rank: int
) -> tuple[bool, Any]:
    """One rank; errors come back as text, so that the first one is seen and not the hang of the others."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    if on_gpu:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # TransformerEngine multiplies float32 in TF32, which rounds too much
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fewer GPUs than ranks: the CPU stand-in refuses to run beside one
        from megatron_mtraining.testing import megatron_on_cpu

        megatron_on_cpu.install()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    try:
        return False, function(**arguments)
    except Exception:
        return True, traceback.format_exc()
    finally:
        dist.destroy_process_group()
