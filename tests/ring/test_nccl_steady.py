"""Over NCCL: memory stands still after the first steps, waits are measured, and a dead rank ends the others in time."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import sparse_attention
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.transport import create_ring_groups
from megatron_mtraining.transport.exposure import ExposureClock

from .processes import outcomes_of_ranks, run_in_processes

SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 8192, 4, 2, 64
CONFIG = MTrainingConfig.algorithm_1(dense_below=0, max_vertical=64, max_slash=16)


class Layer:
    """One rank's part of a layer, and a training step of it."""

    def __init__(self, inner_size: int, schedule: str) -> None:
        world_size = dist.get_world_size()
        self.groups = create_ring_groups([list(range(world_size))], inner_size=inner_size)
        self.layout = SequenceLayout("striped", seq_len=SEQ_LEN, cp_size=world_size)
        self.config = replace(CONFIG, schedule=schedule)
        self.inputs = [
            torch.randn(
                1, self.layout.local_len, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True
            )
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]

    def forward(self) -> torch.Tensor:
        return sparse_attention(*self.inputs, self.config, layout=self.layout, groups=self.groups).out

    def step(self) -> None:
        torch.autograd.grad(self.forward().sum(), self.inputs)


def memory() -> dict[str, int]:
    """What the CUDA runtime was asked for, and what torch keeps of it."""
    torch.cuda.synchronize()
    figures = ("num_device_alloc", "num_device_free", "num_alloc_retries", "reserved_bytes.all.current")
    statistics = torch.cuda.memory_stats()
    return {name: statistics[name] for name in figures} | {"allocated": torch.cuda.memory_allocated()}


def steady_job(inner_size, schedule):
    layer = Layer(inner_size, schedule)
    for _ in range(4):
        layer.step()
    before = memory()
    for _ in range(20):
        layer.step()
    return before, memory()


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize(("inner_size", "schedule"), [(1, "hierarchical"), (2, "hierarchical"), (2, "gather")])
def test_steps_after_the_first_ask_the_device_for_no_memory(inner_size, schedule):
    for before, after in run_in_processes(steady_job, 2, backend="nccl", inner_size=inner_size, schedule=schedule):
        assert after == before


def waiting_job(inner_size, schedule):
    """A host that waits for the device raises, where torch knows of it; and it runs steps ahead of a busy one."""
    layer = Layer(inner_size, schedule)
    for _ in range(3):
        layer.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # two seconds or more
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(2):
        layer.step()
    torch.cuda.set_sync_debug_mode("default")
    ahead = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    return ahead


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize(
    ("inner_size", "schedule"), [(1, "hierarchical"), (2, "hierarchical"), (2, "gather"), (2, "flat")]
)
def test_the_host_never_waits_for_a_step(inner_size, schedule):
    assert run_in_processes(waiting_job, 2, backend="nccl", inner_size=inner_size, schedule=schedule) == [True, True]


def exposure_job():
    layer, clock = Layer(2, "hierarchical"), ExposureClock()
    for _ in range(3):
        layer.step()
    torch.cuda.synchronize()
    clock.start()
    start = time.perf_counter()
    for _ in range(5):
        layer.step()
    torch.cuda.synchronize()
    elapsed_ms = (time.perf_counter() - start) * 1000.0
    clock.stop()
    return clock.take_ms(), elapsed_ms


@pytest.mark.multi_gpu(2)
def test_waits_of_the_ring_are_part_of_the_time_it_takes():
    for exposed_ms, elapsed_ms in run_in_processes(exposure_job, 2, backend="nccl"):
        assert 0.0 < exposed_ms <= elapsed_ms


def dying_job():
    """Rank 1 is killed between forward and backward, which leaves rank 0 in a kernel that never ends."""
    layer = Layer(2, "hierarchical")
    layer.step()
    out = layer.forward()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.autograd.grad(out.sum(), layer.inputs)
    torch.cuda.synchronize()


@pytest.mark.multi_gpu(2)
def test_a_rank_killed_in_a_step_ends_the_other_within_the_timeout():
    outcomes = outcomes_of_ranks(dying_job, 2, backend="nccl", group_timeout_s=20.0, deadline_s=120.0)
    assert outcomes[1].died
    assert outcomes[0].error is not None or outcomes[0].died
