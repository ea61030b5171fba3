"""The same transport checks and the same ring over NCCL, where there are GPUs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining.testing.error_budget import assert_all_within_budget, plain_attention
from megatron_mtraining.transport import as_transport, create_ring_groups

from .cases import Problem, join, layout_of, random_problem, solve_local_part, solve_on_one_device
from .processes import run_in_processes
from .transport_checks import check_transport


def transport_job():
    check_transport(as_transport(dist.group.WORLD), "cuda")


def ring_job(inner_size, schedule):
    groups = create_ring_groups([list(range(dist.get_world_size()))], inner_size=inner_size)
    problem = make_problem()
    on_gpu = Problem(*(tensor.cuda() for tensor in problem[:5]), problem.index.to("cuda"), None)
    layout = layout_of(problem, "striped", dist.get_world_size())
    return [part.cpu() for part in solve_local_part(on_gpu, layout, groups, schedule=schedule)]


def make_problem():
    """The same on every rank: torch draws the tensors, Python's own generator the index."""
    torch.manual_seed(0)
    random.seed(0)
    return random_problem(1024, block_size=64, head_dim=64, slashes=[1, 3, 8]).to(torch.bfloat16)


@pytest.mark.multi_gpu(2)
def test_nccl_does_what_threads_do():
    run_in_processes(transport_job, 2, backend="nccl")


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize(
    ("inner_size", "schedule"), [(1, "hierarchical"), (2, "hierarchical"), (2, "gather"), (2, "flat")]
)
def test_a_ring_over_nccl_is_within_twice_the_error_of_the_plain_way(inner_size, schedule):
    problem = make_problem()
    parts = run_in_processes(ring_job, 2, backend="nccl", inner_size=inner_size, schedule=schedule)
    ours = join(parts, layout_of(problem, "striped", 2))
    exact, plain = (solve_on_one_device(problem.to(torch.float64)), solve_on_one_device(problem, plain_attention))
    assert_all_within_budget(ours, plain, exact, case=schedule)
