"""The rank simulator: results in rank order, errors of the rank that made them, and never a hang."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatron_mtraining.testing import simulator
from megatron_mtraining.testing.simulator import PeerStoppedError, RankSimulator
from megatron_mtraining.transport import Transport


def test_results_come_in_rank_order_from_a_thread_each():
    outcome = RankSimulator(8).run(lambda group: (group.rank, group.size, threading.current_thread().name))
    assert outcome == [(rank, 8, f"rank {rank}") for rank in range(8)]


def test_groups_satisfy_the_interface():
    assert RankSimulator(2).run(lambda group: isinstance(group, Transport)) == [True, True]


def test_the_first_real_error_is_raised_and_names_its_rank():
    """The others wait for rank 2 and are told at once, long before the timeout."""

    def body(group):
        if group.rank == 2:
            raise KeyError("lost")
        return group.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        RankSimulator(4, timeout=60.0).run(body)
    assert caught.value.__notes__ == ["raised on rank 2"]
    assert time.monotonic() - start < 30.0


def test_a_rank_that_returns_early_is_named_to_those_who_wait():
    def body(group):
        if group.rank == 1:
            return None
        return group.exchange(torch.ones(1)).wait()

    with pytest.raises(PeerStoppedError, match="rank 2 waits in exchange for rank 1, which has returned."):
        RankSimulator(3).run(body)


def test_a_rank_that_neither_comes_nor_ends_is_named_after_the_timeout(monkeypatch):
    monkeypatch.setattr(simulator, "_REPORT_S", 1.0)
    release = threading.Event()

    def body(group):
        if group.rank == 1:
            release.wait(30.0)
            return None
        return group.all_gather(torch.ones(1))

    with pytest.raises(
        TimeoutError, match="rank 0 waits in all_gather for rank 1, which has sent nothing 0.3 s after the start."
    ):
        RankSimulator(2, timeout=0.3).run(body)
    release.set()


def test_a_rank_that_hangs_alone_does_not_hang_the_caller(monkeypatch):
    monkeypatch.setattr(simulator, "_REPORT_S", 0.1)
    release = threading.Event()
    with pytest.raises(TimeoutError, match="rank 0 did not end within 0.2 s."):
        RankSimulator(1, timeout=0.2).run(lambda group: release.wait(30.0))
    release.set()


def test_ranks_in_different_operations_are_named():
    def body(group):
        return group.all_gather(torch.ones(1)) if group.rank else group.all_to_all(torch.ones(2))

    with pytest.raises(RuntimeError, match="which called all_(gather|to_all) instead."):
        RankSimulator(2).run(body)


def test_unequal_shapes_are_named():
    def body(group):
        return group.exchange(torch.ones(1 + group.rank)).wait()

    with pytest.raises(
        RuntimeError, match=r"expects float32\[\d\] in exchange from rank \d, which sent float32\[\d\]."
    ):
        RankSimulator(2).run(body)


def test_received_tensors_are_copies():
    def body(group):
        sent = torch.full((3,), float(group.rank))
        pending = group.exchange(sent)
        sent.fill_(-1.0)
        gathered = group.all_gather(sent)
        gathered.add_(100.0)
        received = pending.wait()
        received.add_(0.5)
        return received.tolist(), sent.tolist()

    assert RankSimulator(2).run(body) == [([1.5] * 3, [-1.0] * 3), ([0.5] * 3, [-1.0] * 3)]


def test_exchanges_may_be_waited_for_in_any_order_with_collectives_between():
    def body(group):
        first, second = (group.exchange(torch.tensor([group.rank + offset])) for offset in (0, 10))
        total = group.all_reduce(torch.tensor([1])).item()
        return second.wait().item(), first.wait().item(), total

    assert RankSimulator(3).run(body) == [(12, 2, 3), (10, 0, 3), (11, 1, 3)]


def test_split_gives_disjoint_groups():
    def body(group):
        inner = group.split([[0, 1, 2], [3, 4, 5]])
        outer = group.split([[0, 3], [1, 4], [2, 5]])
        own = torch.tensor([group.rank])
        return inner.global_ranks, inner.all_gather(own).flatten().tolist(), outer.all_gather(own).flatten().tolist()

    for rank, (members, inner, outer) in enumerate(RankSimulator(6).run(body)):
        assert members == tuple(inner) == ((0, 1, 2) if rank < 3 else (3, 4, 5))
        assert outer == [rank % 3, rank % 3 + 3]


def test_a_partition_must_hold_this_rank():
    with pytest.raises(ValueError, match="partition must be lists of ranks that hold rank 1"):
        RankSimulator(2).run(lambda group: group.split([[0]]))


def test_a_job_has_at_least_one_rank():
    with pytest.raises(ValueError, match="world_size must be an integer of at least 1, got 0."):
        RankSimulator(0).run(lambda group: None)
