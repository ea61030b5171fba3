"""The transport of one rank and of threads, group arithmetic, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import (
    SoloTransport,
    Transport,
    as_transport,
    inner_and_outer_ranks,
    process_group,
)
from tests.ring.transport_checks import check_transport


def test_one_rank_alone():
    check_transport(SoloTransport())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_threads(world_size):
    RankSimulator(world_size).run(check_transport)


def test_threads_of_a_strided_subgroup():
    RankSimulator(6).run(lambda group: check_transport(group.split([[0, 2, 4], [1, 3, 5]])))


def test_one_rank_alone_keeps_its_number_in_the_job():
    assert SoloTransport(5).global_ranks == (5,)
    assert isinstance(SoloTransport(), Transport)


def test_results_share_no_memory_with_the_input():
    group, tensor = SoloTransport(), torch.zeros(1, 2)
    results = (group.exchange(tensor).wait(), group.all_gather(tensor), group.post_reduce_scatter(tensor).wait())
    for result in (*results, group.all_to_all(tensor)):
        result.add_(1.0)
    assert torch.equal(tensor, torch.zeros(1, 2))


def test_sums_of_many_half_precision_parts_do_not_stall():
    """Sixty-four times 1 + 2**-7 in bfloat16: added one by one in bfloat16 the small part would be lost."""
    one = torch.tensor([1.0078125], dtype=torch.bfloat16)
    (first, *_) = RankSimulator(64).run(lambda group: group.all_reduce(one.clone()))
    assert first.item() == 64.5


def test_a_transport_is_taken_as_it_is():
    group = SoloTransport()
    assert as_transport(group) is group


@pytest.mark.parametrize("group", [None, -100, "world"])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(
        ValueError, match="group must be a torch process group that this rank belongs to, or a Transport"
    ):
        as_transport(group)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_calls_are_refused(world_size):
    def body(group):
        with pytest.raises(ValueError, match="op must be one of sum, max, got 'mean'."):
            group.all_reduce(torch.ones(1), op="mean")
        for call in (group.post_reduce_scatter, group.all_to_all):
            with pytest.raises(
                ValueError, match=rf"tensor must be of shape \[{world_size}, ...\], one entry for each rank"
            ):
                call(torch.ones(world_size + 1))
            with pytest.raises(ValueError, match="one entry for each rank"):
                call(torch.tensor(1.0))

    RankSimulator(world_size).run(body)


def test_the_solo_transport_refuses_the_same():
    with pytest.raises(ValueError, match="op must be one of sum, max"):
        SoloTransport().all_reduce(torch.ones(1), op="mean")


@pytest.mark.parametrize(
    ("inner_size", "inner", "outer"),
    [
        (1, [[4], [6], [8], [10], [12], [14]], [[4, 6, 8, 10, 12, 14]]),
        (2, [[4, 6], [8, 10], [12, 14]], [[4, 8, 12], [6, 10, 14]]),
        (3, [[4, 6, 8], [10, 12, 14]], [[4, 10], [6, 12], [8, 14]]),
        (6, [[4, 6, 8, 10, 12, 14]], [[4], [6], [8], [10], [12], [14]]),
    ],
)
def test_inner_is_contiguous_and_outer_strided_within_the_group(inner_size, inner, outer):
    assert inner_and_outer_ranks(range(4, 16, 2), inner_size=inner_size) == (inner, outer)


@pytest.mark.parametrize("inner_size", [0, -2, 4, 12])
def test_inner_size_divides_the_group(inner_size):
    with pytest.raises(
        ValueError, match=f"inner_size must be a divisor of the context-parallel size 6, got {inner_size}."
    ):
        inner_and_outer_ranks(range(6), inner_size=inner_size)


def test_process_groups_are_loaded_only_when_there_is_one():
    script = (
        "import sys, megatron_mtraining.transport as t; t.as_transport(t.SoloTransport());"
        "print('megatron_mtraining.transport.process_group' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_a_receive_is_posted_before_the_send(monkeypatch):
    """Gloo announces it on the connection of both, on which it would queue behind the data."""
    dist, posted = process_group.dist, []
    monkeypatch.setattr(dist, "P2POp", lambda operation, *_: operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: posted.extend(operations) or [])
    for name, value in (("get_rank", 0), ("get_world_size", 2), ("get_backend_config", "cpu:gloo")):
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])

    class Group:
        """Of two ranks."""

    group = Group()
    process_group.ProcessGroupTransport(group).exchange(torch.ones(2)).wait()
    assert posted == [dist.irecv, dist.isend]
