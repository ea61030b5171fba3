"""A killed rank is named by every other one, whatever that one is doing; a rank that leaves in peace is not."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.transport.health_monitor import (
    lost_hosts,
    lost_rank_message,
    monitor,
    process,
    start_health_monitor,
    stop_health_monitor,
)
from megatron_mtraining.transport.health_monitor.monitor import HealthMonitor
from megatron_mtraining.transport.health_monitor.process_id import ProcessId
from megatron_mtraining.transport.health_monitor.termination import TerminationSignal

from .cases import layout_of, random_problem
from .processes import outcomes_of_ranks

DEATH = r"rank 1 \(host \S+, process \d+, 17 training steps done\) has died\."


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stuck_job(folder):
    """Rank 1 is killed while the others wait for something that no error ends, as a GPU's kernel is."""
    rank = dist.get_rank()
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    start_health_monitor(timeout_s=60.0, training_step=lambda: 17)
    dist.barrier()
    time.sleep(2.0)  # a heartbeat has sent the step
    if rank == 1:
        die()
    time.sleep(600.0)


def test_ranks_that_hang_end_and_name_the_killed_one(tmp_path):
    outcomes = outcomes_of_ranks(stuck_job, 3, folder=str(tmp_path), deadline_s=200.0)
    assert all(outcome.died for outcome in outcomes)
    for rank in (0, 2):
        assert re.fullmatch(rf"rank {rank}: {DEATH} This rank ends too\.\n", (tmp_path / str(rank)).read_text())


def ring_job():
    """Rank 1 is killed between forward and backward; gloo notices at once, but names addresses only."""
    start_health_monitor(timeout_s=60.0, training_step=lambda: 17)
    random.seed(0)
    torch.manual_seed(0)
    problem = random_problem(144, block_size=8)
    layout = layout_of(problem, "striped", 3)
    part = [tensor[:, : layout.local_len].clone().requires_grad_() for tensor in problem[:3]]
    out, _ = sparse_attention(*part, index=problem.index, layout=layout, groups=dist.group.WORLD)
    dist.barrier()
    time.sleep(2.0)
    if dist.get_rank() == 1:
        die()
    out.sum().backward()


def test_an_error_of_the_ring_names_the_killed_rank():
    outcomes = outcomes_of_ranks(ring_job, 3, group_timeout_s=20.0, deadline_s=60.0)
    assert outcomes[1].died
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RuntimeError)
        assert re.search(DEATH, str(outcomes[rank].error))


def deregistering_job():
    start_health_monitor(timeout_s=60.0)
    dist.barrier()
    if dist.get_rank() == 1:
        stop_health_monitor()
        return "deregistered"
    time.sleep(4.0)
    message = lost_rank_message()
    stop_health_monitor()
    return message


def test_a_rank_that_deregisters_is_not_reported():
    outcomes = outcomes_of_ranks(deregistering_job, 3)
    assert [outcome.result for outcome in outcomes] == [None, "deregistered", None]


SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
from megatron_mtraining.transport.health_monitor import start_health_monitor
dist.init_process_group("gloo")
start_health_monitor(timeout_s=60.0, training_step=lambda: 17)
dist.barrier()
time.sleep(2.0)
if dist.get_rank() == 1:
    {ending}
time.sleep(60.0)
"""


@pytest.mark.parametrize(
    ("ending", "news"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", DEATH),
        (
            "raise MemoryError('of the device')",
            r"rank 1 \(host \S+, process \d+, 17 training steps done\) stopped with MemoryError: of the device\.",
        ),
        (
            "try:\n        raise ValueError('bad batch')\n    finally:\n        dist.destroy_process_group()",
            r"rank 1 \(host \S+, process \d+, 17 training steps done\) stopped with ValueError: bad batch\.",
        ),
    ],
    ids=["killed", "error", "error-after-its-group"],
)
def test_the_message_comes_though_torchrun_ends_every_rank(tmp_path, ending, news):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(ending=ending))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode != 0
    assert re.search(rf"rank 0: {news} This rank ends too\.", run.stderr)


def forking_job():
    """A forked child ends on SIGTERM as any process does, and its parent does not."""
    start_health_monitor(timeout_s=60.0)
    child = os.fork()
    if child == 0:
        time.sleep(60.0)
        os._exit(0)
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    time.sleep(2.0)
    stop_health_monitor()
    return os.WTERMSIG(status), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_children_are_no_ranks():
    outcomes = outcomes_of_ranks(forking_job, 2)
    assert [outcome.result for outcome in outcomes] == [(signal.SIGTERM, True)] * 2


def test_a_process_has_ended_when_it_is_gone_or_waits_for_its_parent():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own, seen = ProcessId.of(os.getpid()), ProcessId.of(child.pid)
    assert own.is_visible() and seen.is_visible()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert seen.has_ended()  # a zombie
    child.wait()
    assert seen.has_ended()
    assert ProcessId(own.host, own.pid, "1").has_ended()  # a later process of the same number
    assert not ProcessId("elsewhere", own.pid, own.started).is_visible()


def test_a_handler_that_came_later_has_sigterm_to_itself():
    heard = []
    termination = TerminationSignal()
    termination.catch()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.wait(5.0)
        signal.signal(signal.SIGTERM, lambda *_: heard.append("saved"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert not termination.wait(5.0)
        assert heard == ["saved"]
        termination.release()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        termination.release()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        termination.close()


def destroying_job(folder):
    """Ends its process group, and with it the store, as where a rank keeps that; goes on, and forms another job."""
    monitor._POLL_S, monitor._GRACE_S = 0.1, 0.1
    start_health_monitor(timeout_s=0.0)
    dist.barrier()
    rank, world_size, first = dist.get_rank(), dist.get_world_size(), process._monitor
    dist.destroy_process_group()
    first._store = SilentStore()
    time.sleep(1.5)
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=world_size)
    start_health_monitor(timeout_s=60.0)
    second = process._monitor
    dist.barrier()
    stop_health_monitor()
    return second is not first


def test_a_monitor_ends_with_the_process_group(tmp_path):
    outcomes = outcomes_of_ranks(destroying_job, 2, folder=str(tmp_path))
    assert [outcome.result for outcome in outcomes] == [True, True]


class SilentStore:
    """A store whose server is gone."""

    def check(self, *_):
        raise RuntimeError("Connection reset by peer")

    set = compare_set = check


def test_nobody_died_as_long_as_the_store_cannot_say_who_left(monkeypatch):
    """The rank that keeps the store may have ended in peace; silence for too long is news all the same."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    members = [ProcessId.of(child.pid), ProcessId.of(os.getpid())]
    health = HealthMonitor(SilentStore(), members, 1, timeout_s=30.0, training_step=lambda: None)
    child.communicate(b"\n")
    health._check(heartbeat_due=True)
    assert health.check_now() is None
    later = time.monotonic() + 31.0
    monkeypatch.setattr(monitor.time, "monotonic", lambda: later)
    health._check(heartbeat_due=True)
    assert re.fullmatch(
        r"rank 0 \(host \S+, process \d+\) ended, and the job's store no longer answers: Connection reset by peer\.",
        health.check_now(),
    )


class TestLostHosts:
    MEMBERS = [ProcessId(host, pid, "") for pid, host in enumerate("aabbcc")]

    @pytest.fixture
    def store(self):
        return dist.HashStore()

    @pytest.fixture
    def clock(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(lost_hosts.time, "monotonic", lambda: now[0])
        return now

    def lost(self, store, rank):
        return lost_hosts.LostHosts(store, self.MEMBERS, rank, timeout_s=30.0)

    def test_the_first_rank_of_a_host_monitors_the_next_host(self, store, clock):
        monitors = [self.lost(store, rank) for rank in range(6)]
        for rank in range(6):
            store.set(f"heartbeat/{rank}", "[1, 0]")
        assert [each.find() for each in monitors] == [[]] * 6
        clock[0] = 31.0
        assert [each.find() for each in monitors] == [[2, 3], [], [4, 5], [], [0, 1], []]

    def test_one_living_rank_is_enough(self, store, clock):
        hosts = self.lost(store, 0)
        for number, clock[0] in enumerate((0.0, 20.0, 40.0)):
            store.set("heartbeat/3", f"[{number}, 5]")
            assert hosts.find() == []

    def test_a_host_that_does_not_train_yet_or_has_left_is_not_missed(self, store, clock):
        hosts = self.lost(store, 0)
        store.set("heartbeat/2", "[1, null]")
        hosts.find()
        clock[0] = 100.0
        assert hosts.find() == []
        store.set("heartbeat/2", "[2, 0]")
        hosts.find()
        store.set("deregistered/2", "")
        store.set("deregistered/3", "")
        clock[0] = 200.0
        assert hosts.find() == []


def test_without_a_monitor_there_is_no_message():
    assert lost_rank_message() is None
    stop_health_monitor()
