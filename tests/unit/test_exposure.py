"""Waits are measured while a clock runs, by it alone, and those of the measurement itself are not."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.transport import exposure
from megatron_mtraining.transport.exposure import ExposureClock, exposed, unexposed

CPU = torch.device("cpu")


@pytest.fixture
def wait(monkeypatch):
    """Waits on the host for so many seconds of a clock that stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(exposure.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        with exposed(CPU):
            now[0] += seconds

    return wait


@pytest.fixture
def clock():
    clock = ExposureClock()
    yield clock
    clock.stop()


def test_waits_count_while_the_clock_runs(clock, wait):
    wait(0.5)
    clock.start()
    wait(0.25)
    with unexposed():
        wait(0.5)
    wait(0.125)
    clock.stop()
    wait(0.5)
    assert clock.take_ms() == 375.0
    assert clock.take_ms() == 0.0


def test_a_clock_stops_only_itself(clock, wait):
    ended = ExposureClock()
    ended.start()
    clock.start()
    ended.stop()
    wait(0.25)
    assert clock.take_ms() == 250.0
    assert ended.take_ms() == 0.0


@pytest.mark.gpu
def test_a_wait_of_a_stream_takes_as_long_as_what_it_waits_for(clock):
    """The host goes on at once; more waits than are kept unread."""
    device = torch.device("cuda")
    side = torch.cuda.Stream()
    clock.start()
    for _ in range(300):
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)  # half a millisecond and more
        with exposed(device):
            torch.cuda.current_stream().wait_stream(side)
    assert clock.take_ms() > 100.0
