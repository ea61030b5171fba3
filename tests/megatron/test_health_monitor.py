"""A rank killed in the middle of a training step is named by the others, though their launcher ends them at once."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from . import tiny_gpt
from .ranks import run_on_ranks


def killed_in_backward(folder: str) -> None:
    """The last rank dies in the backward pass of the second step; the others note the error or message they get."""
    import torch.distributed as dist

    from megatron_mtraining.transport.health_monitor import start_health_monitor

    rank, world_size = dist.get_rank(), dist.get_world_size()
    note = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(note, 2)
    with tiny_gpt.parallel_job(cp_size=world_size, inner_size=1):
        start_health_monitor(timeout_s=60, training_step=lambda: 7)
        model = tiny_gpt.build(tiny_gpt.sparse_spec()).train()
        tiny_gpt.mean_loss(model, tiny_gpt.batch()).backward()
        time.sleep(3.0)  # a heartbeat has sent the step
        if rank == world_size - 1:
            last = list(model.parameters())[-1]
            last.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        try:
            tiny_gpt.mean_loss(model, tiny_gpt.batch()).backward()
        except RuntimeError as error:
            os.write(note, str(error).encode())
            raise


def test_a_killed_rank_is_named_by_every_other_one(tmp_path):
    with pytest.raises(BrokenProcessPool):
        run_on_ranks(killed_in_backward, 2, folder=str(tmp_path))
    news = r"rank 1 \(host \S+, process \d+, 7 training steps done\) has died\."
    assert re.search(news, (tmp_path / "0").read_text())
    assert not re.search("has died", (tmp_path / "1").read_text())


def footprint(timeout_s: int) -> tuple[list[str], bool, bool]:
    """Threads of this package, and whether ``sys.excepthook`` and SIGTERM are as the interpreter left them."""
    import argparse

    from megatron_mtraining.arguments import add_arguments
    from megatron_mtraining.megatron.hooks import ensure_runtime
    from megatron_mtraining.megatron.runtime import process
    from megatron_mtraining.transport.health_monitor import stop_health_monitor

    flags = ["--mtraining-health-monitor-timeout-s", str(timeout_s)] if timeout_s else []
    process().args = add_arguments(argparse.ArgumentParser(), defaults=tiny_gpt.SPARSE).parse_args(flags)
    hook = sys.excepthook
    with tiny_gpt.parallel_job(cp_size=2, inner_size=1):
        ensure_runtime()
        threads = [thread.name for thread in threading.enumerate() if "mtraining" in thread.name]
        state = threads, sys.excepthook is hook, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        stop_health_monitor()
    process().args = None
    return state


def test_the_health_monitor_is_off_unless_its_flag_is_given():
    """Without the flag nothing of the process is changed; with it the thread runs and the hooks are chained."""
    assert run_on_ranks(footprint, 2, timeout_s=0) == [([], True, True)] * 2
    assert run_on_ranks(footprint, 2, timeout_s=30) == [(["mtraining health monitor"], False, False)] * 2
