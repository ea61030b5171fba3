"""What all tests share: one torch thread, one seed, how examples are drawn, and skips where the GPUs are too few."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings

# The same examples in every run, unless ``--hypothesis-profile soak`` asks for many, each time others.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("soak", max_examples=2000, deadline=None, derandomize=False, print_blob=True)
settings.load_profile("repeatable")


def gpu_shortage(item: pytest.Item, available: int) -> str | None:
    """Why ``item`` cannot run with ``available`` GPUs, or None when it can."""
    needed = 1 if item.get_closest_marker("gpu") else 0
    for marker in item.iter_markers("multi_gpu"):
        if len(marker.args) != 1 or not isinstance(marker.args[0], int):
            raise pytest.UsageError(f"multi_gpu must be given one number of GPUs, got {marker.args} on {item.nodeid}.")
        needed = max(needed, marker.args[0])
    return f"needs {needed} CUDA GPU(s), this machine has {available}" if needed > available else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that ask for more GPUs than there are, and says so."""
    available = torch.cuda.device_count()
    for item in items:
        reason = gpu_shortage(item, available)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Keeps a test's timing and its rounding independent of the machine's cores."""
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1234, help="Random state that each test starts from (1234).")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a test module draws as it is imported is the same in every run too."""
    _seed(collector.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Starts every test, and the fixtures of any scope that it is the first to ask for, from the same random state."""
    _seed(item.config)


def _seed(config: pytest.Config) -> None:
    random.seed(config.getoption("seed"))
    torch.manual_seed(config.getoption("seed"))
