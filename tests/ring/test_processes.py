"""Ring attention over gloo processes: groups inside a larger job, strided ones, dying and disagreeing ranks."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_mtraining import select
from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.errors import RankMismatchError
from megatron_mtraining.layout import shard_sequence
from megatron_mtraining.transport import SoloTransport, as_ring_groups, as_transport, create_ring_groups
from megatron_mtraining.transport.process_group import ProcessGroupTransport

from .cases import (
    join,
    layout_of,
    random_bounds,
    random_problem,
    solve_local_part,
    solve_on_one_device,
    solve_on_ranks,
    worst_error,
)
from .processes import outcomes_of_ranks, run_in_processes
from .transport_checks import check_transport

CONTIGUOUS_PAIRS = [[0, 1], [2, 3]]  # data parallel 2 x context parallel 2
STRIDED_PAIRS = [[0, 2], [1, 3]]  # tensor parallel 2 x context parallel 2
WHOLE = [[0, 1, 2, 3]]


def own_group(rank_lists):
    """This rank's process group among ``rank_lists``, all of which are made."""
    groups = [dist.new_group(ranks) for ranks in rank_lists]
    return next(group for group, ranks in zip(groups, rank_lists, strict=True) if dist.get_rank() in ranks)


def make_problem(number=0, seq_len=128, dtype=torch.float64):
    """The same on every rank; another one for each ``number``."""
    random.seed(number)
    torch.manual_seed(number)
    return random_problem(seq_len, block_size=8, bounds=random_bounds(seq_len, 4)).to(dtype)


def transport_job(rank_lists):
    transport = as_transport(own_group(rank_lists))
    check_transport(transport)
    return transport.global_ranks


@pytest.mark.parametrize("rank_lists", [WHOLE, CONTIGUOUS_PAIRS, STRIDED_PAIRS, [[0, 1, 2], [3]]])
def test_gloo_does_what_threads_do(rank_lists):
    results = run_in_processes(transport_job, 4, rank_lists=rank_lists)
    assert results == [tuple(ranks) for rank in range(4) for ranks in rank_lists if rank in ranks]


def half_precision_job():
    """256 on another rank for each entry, 1 elsewhere; bfloat16 has no odd numbers there."""
    mine = torch.ones(4, dtype=torch.bfloat16)
    mine[dist.get_rank()] = 256.0
    transport = as_transport(dist.group.WORLD)
    return transport.all_reduce(mine.clone()).tolist(), transport.post_reduce_scatter(mine).wait().item()


def test_gloo_sums_half_precision_as_float32():
    """259 rounds to 260 once; added in bfloat16, 256 + 1 would stay 256."""
    assert run_in_processes(half_precision_job, 4) == [([260.0] * 4, 260.0)] * 4


def ring_job(rank_lists, inner_size, schedule, kind, dtype=torch.float64, config=None):
    """Each context-parallel group has a problem of its own, as data parallel ranks would."""
    cp_group = own_group(rank_lists)
    groups = create_ring_groups(rank_lists, cp_group=cp_group, inner_size=inner_size)
    number = min(dist.get_process_group_ranks(cp_group))
    problem = make_problem(number, dtype=dtype)
    layout = layout_of(problem, kind, dist.get_world_size(cp_group))
    return solve_local_part(problem, layout, groups, schedule=schedule, config=config)


def joined_results(rank_lists, kind, dtype=torch.float64, **arguments):
    """``(problem, PARTS)`` of each context-parallel group."""
    parts = run_in_processes(ring_job, 4, rank_lists=rank_lists, kind=kind, dtype=dtype, **arguments)
    for ranks in rank_lists:
        problem = make_problem(min(ranks), dtype=dtype)
        yield problem, join([parts[rank] for rank in ranks], layout_of(problem, kind, len(ranks)))


@pytest.mark.parametrize(
    ("rank_lists", "inner_size", "schedule", "kind"),
    [
        (WHOLE, 4, "flat", "zigzag"),
        (CONTIGUOUS_PAIRS, 2, "hierarchical", "striped"),
        (STRIDED_PAIRS, 1, "hierarchical", "zigzag"),
        (STRIDED_PAIRS, 2, "gather", "contiguous"),
    ],
)
def test_groups_inside_a_larger_job_agree_with_the_oracle(rank_lists, inner_size, schedule, kind):
    for problem, got in joined_results(rank_lists, kind, inner_size=inner_size, schedule=schedule):
        assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


def mesh_job(shape, schedule):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    problem = make_problem()
    return solve_local_part(problem, layout_of(problem, "striped", 4), mesh, schedule=schedule)


@pytest.mark.parametrize(
    ("shape", "schedule"), [((2, 2), "hierarchical"), ((2, 2), "gather"), ((1, 4), "hierarchical"), ((4, 1), "flat")]
)
def test_a_device_mesh_agrees_with_the_oracle(shape, schedule):
    problem = make_problem()
    got = join(run_in_processes(mesh_job, 4, shape=shape, schedule=schedule), layout_of(problem, "striped", 4))
    assert worst_error(got, solve_on_one_device(problem)) <= 1e-10


def refused_meshes_job():
    sentences = []
    for mesh in (
        init_device_mesh("cpu", (2, 2)),
        init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)),
        DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]), mesh_dim_names=("outer", "inner")),
    ):
        with pytest.raises(ValueError) as raised:
            as_ring_groups(mesh)
        sentences.append(str(raised.value))
    return sentences


def test_meshes_that_do_not_number_ranks_as_the_group_does_are_refused():
    named = "groups must be a DeviceMesh of two named dimensions, (outer, inner), got"
    assert (
        run_in_processes(refused_meshes_job, 4)
        == [
            [
                f"{named} 2 dimensions without names.",
                f"{named} 1 dimensions ('cp',).",
                "groups must be a DeviceMesh of ascending ranks, got [1, 0, 3, 2].",
            ]
        ]
        * 4
    )


@pytest.mark.parametrize(("pattern", "schedule"), [("moba", "gather"), ("xattention", "flat")])
def test_keys_travel_while_block_lists_are_selected(pattern, schedule):
    """In a flat ring those of the selection follow those of the attention through one group."""
    sizes = {"moba_chunk": 16, "moba_top_k": 2, "xattention_block": 16, "xattention_stride": 4}
    config = MTrainingConfig(pattern=pattern, block_size=8, dense_below=0, xattention_threshold=0.5, **sizes)
    ((problem, got),) = joined_results(WHOLE, "striped", inner_size=2, schedule=schedule, config=config)
    index = select(problem.query, problem.key, config, cu_seqlens=problem.cu_seqlens)
    assert worst_error(got, solve_on_one_device(problem._replace(index=index))) <= 1e-10


@pytest.mark.parametrize("schedule", ["hierarchical", "gather"])
def test_bfloat16_over_gloo_gives_the_bits_of_threads(schedule):
    """Movement is exact everywhere; sums of float32 gradients may differ in their order only."""
    ((problem, got),) = joined_results(WHOLE, "striped", torch.bfloat16, inner_size=2, schedule=schedule)
    want = solve_on_ranks(problem, "striped", 4, schedule=schedule, inner_size=2)
    for name in ("out", "lse", "grad_query"):
        assert torch.equal(got[name], want[name])
    for name in ("grad_key", "grad_value"):
        torch.testing.assert_close(got[name], want[name], rtol=2**-7, atol=1e-6)


def groups_job():
    """What is refused, and what a rank outside all lists gets; all ranks go through the same calls."""
    refused = []
    for rank_lists, inner_size in (([[0, 1, 2]], 2), ([[0, 1], [1, 2]], 1), ([[0, 3]], 1), ([[1, 0]], 1)):
        with pytest.raises(ValueError) as caught:
            create_ring_groups(rank_lists, inner_size=inner_size)
        refused.append(str(caught.value))
    groups = create_ring_groups([[0, 2]], inner_size=1)
    if dist.get_rank() == 1:
        assert groups is None
        excluded = dist.new_group([0, 2])
        with pytest.raises(ValueError, match="group must be a torch process group that this rank belongs to"):
            as_transport(excluded)
        return refused, None
    dist.new_group([0, 2])
    assert isinstance(as_transport(groups.inner), SoloTransport)
    made = {groups.inner, groups.outer, groups.inner_gradient, groups.outer_gradient}
    assert len(made) == 4
    job, *own = (each._get_backend(torch.device("cpu")).options._timeout for each in (dist.group.WORLD, *made))
    assert own == [job] * 4 and job != dist.default_pg_timeout
    levels = [as_transport(getattr(groups, name)).global_ranks for name in ("inner", "outer", "outer_gradient")]
    return refused, levels


def test_ring_groups_are_made_for_all_ranks_at_once():
    outcomes = run_in_processes(groups_job, 3)
    for refused, _ in outcomes:
        assert refused == [
            "inner_size must be a divisor of the context-parallel size 3, got 2. "
            "Give the number of context-parallel ranks in one node.",
            "cp_rank_lists must be lists that name each rank once, got rank 1 twice.",
            "cp_rank_lists must be lists of ranks of this job, 0 to 2, got rank 3.",
            "cp_rank_lists must be lists in ascending order, got [1, 0].",
        ]
    assert [levels for _, levels in outcomes] == [[(0,), (0, 2), (0, 2)], None, [(2,), (0, 2), (0, 2)]]


def dying_job(ending):
    """Rank 1 does not reach its backward: it is killed, or it hangs for longer than the group's timeout."""
    problem = make_problem(seq_len=144)
    layout = layout_of(problem, "striped", 3)
    part = [tensor[:, : layout.local_len].clone().requires_grad_() for tensor in problem[:3]]
    out, _ = sparse_attention(
        *part, index=problem.index, layout=layout, groups=dist.group.WORLD, cu_seqlens=problem.cu_seqlens
    )
    if dist.get_rank() == 1 and ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        time.sleep(8.0)
        return
    out.sum().backward()


@pytest.mark.parametrize(("ending", "group_timeout_s"), [("killed", 20.0), ("hangs", 3.0)])
def test_a_rank_that_dies_gives_the_others_an_error_within_the_timeout(ending: str, group_timeout_s: float):
    outcomes = outcomes_of_ranks(dying_job, 3, group_timeout_s=group_timeout_s, deadline_s=60.0, ending=ending)
    assert outcomes[1].died == (ending == "killed")
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RuntimeError)
        assert f"failed on rank {rank} in the group of ranks 0, 1, 2: " in str(outcomes[rank].error)
        assert f"the first suspect is rank {(rank - 1) % 3}, which sends to this one." in str(outcomes[rank].error)


def disagreeing_job():
    """Ranks 0 and 2 have another scale; afterwards the group still works."""
    problem = make_problem()
    layout = layout_of(problem, "striped", 4)
    part = [tensor[:, : layout.local_len] for tensor in problem[:3]]
    options = {"index": problem.index, "layout": layout, "groups": dist.group.WORLD, "cu_seqlens": problem.cu_seqlens}
    with pytest.raises(RankMismatchError) as caught:
        sparse_attention(*part, softmax_scale=0.25 if dist.get_rank() == 2 else 0.5, **options)
    sparse_attention(*part, softmax_scale=0.25, **options)
    return str(caught.value)


def test_disagreeing_ranks_are_named_and_the_group_stays_usable():
    for rank, sentence in enumerate(run_in_processes(disagreeing_job, 4)):
        assert sentence == (
            "softmax_scale must be the same on every rank of the group, got another value on rank 2 than on "
            f"ranks 0, 1, 3, here on rank {rank} {0.25 if rank == 2 else 0.5}."
        )


def failing_job():
    """Steps that fail on all ranks, with transfers under way in both levels; what a call gives after each of them."""
    problem = make_problem()
    layout = layout_of(problem, "striped", 4)
    groups = create_ring_groups(WHOLE, inner_size=2)
    part = [shard_sequence(each, layout, cp_rank=dist.get_rank(), dim=1).requires_grad_() for each in problem[:3]]
    options = {"index": problem.index, "layout": layout, "groups": groups, "cu_seqlens": problem.cu_seqlens}

    def attend():
        return sparse_attention(*part, **options).out

    expected, begun = attend(), attend()
    repeated = []
    for operation, call in (("forward", attend), ("backward", begun.sum().backward)):
        with mock.patch.object(ReferenceBackend, operation, side_effect=MemoryError), pytest.raises(MemoryError):
            call()
        repeated.append(torch.equal(attend(), expected))
    return repeated


def test_a_step_that_fails_on_all_ranks_leaves_the_groups_usable():
    """What nobody waited for must not take what a later call sends."""
    assert run_in_processes(failing_job, 4, group_timeout_s=15.0) == [[True, True]] * 4


def devices_job():
    with pytest.raises(ValueError) as caught:
        ProcessGroupTransport(dist.group.WORLD).all_gather(torch.empty(1, device="meta"))
    return str(caught.value)


def test_memory_that_the_group_cannot_send_from_is_refused():
    for sentence in run_in_processes(devices_job, 2):
        assert sentence.startswith("group must be able to send tensors from meta memory, got a group with backends")
        assert sentence.endswith("Create it with backend='cpu:gloo,cuda:nccl', or move the tensors.")


def one_transport_job():
    group = dist.new_group([0, 1])
    alive = weakref.ref(group)
    transport = as_transport(group)
    assert as_transport(group) is transport
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError) as caught:
        transport.all_reduce(torch.ones(1))
    return str(caught.value)


def test_a_group_has_one_transport_which_does_not_keep_it_alive():
    assert (
        run_in_processes(one_transport_job, 2)
        == ["The process group of ranks (0, 1) must be alive, got a destroyed one."] * 2
    )
