"""A rank killed in the middle of a training step is named by the others, though their launcher ends them at once."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from megatron_mtraining.config import MTrainingConfig

from . import tiny_gpt
from .ranks import run_on_ranks


def killed_in_backward(folder: str) -> None:
    """The last rank dies in the backward pass of the second step; the others note the error or message they get."""
    import torch.distributed as dist

    from megatron_mtraining import megatron as mtraining
    from megatron_mtraining.megatron import watch
    from megatron_mtraining.megatron.runtime import current_runtime

    rank, world_size = dist.get_rank(), dist.get_world_size()
    note = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(note, 2)
    with tiny_gpt.parallel_job(cp_size=world_size, inner_size=1):
        mtraining.set_training_step(7)
        watch.install(current_runtime())
        model = tiny_gpt.build(tiny_gpt.sparse_spec()).train()
        tiny_gpt.mean_loss(model, tiny_gpt.batch()).backward()
        time.sleep(3.0)  # a sign of life has told the step
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


def threads_that_watch(config: MTrainingConfig) -> list[str]:
    from megatron_mtraining.megatron import watch
    from megatron_mtraining.megatron.runtime import current_runtime

    with tiny_gpt.parallel_job(config, cp_size=2, inner_size=1):
        watch.install(current_runtime())
        names = [thread.name for thread in threading.enumerate() if "mtraining" in thread.name]
        watch.uninstall()
    return names


@pytest.mark.parametrize(("timeout_s", "names"), [(0, []), (30, ["mtraining rank watch"])])
def test_a_timeout_of_zero_watches_over_nobody(timeout_s, names):
    config = dataclasses.replace(tiny_gpt.SPARSE, lost_rank_timeout_s=timeout_s)
    assert run_on_ranks(threads_that_watch, 2, config=config) == [names, names]
