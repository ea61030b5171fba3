"""What processes are forked from holds what they start with, or each imports torch and Megatron for seconds, unseen."""

from __future__ import annotations

import gc
import sys

import pytest

from tests.forkserver import preloaded
from tests.ring.processes import run_in_processes

FROZEN_AT_LEAST = 100_000


def missing_in_a_rank() -> tuple[set[str], bool]:
    return set(preloaded()) - set(sys.modules), gc.get_freeze_count() > FROZEN_AT_LEAST


def test_ranks_start_with_all_that_is_preloaded():
    pytest.importorskip("megatron.core")
    assert run_in_processes(missing_in_a_rank, 1) == [(set(), True)]
