"""What processes are forked from holds what they start with, or each imports torch and Megatron for seconds, unseen."""

from __future__ import annotations

import gc
import signal
import sys
from importlib.util import find_spec

import pytest

from tests.forkserver import preloaded
from tests.program_server import LIBRARIES
from tests.programs import run_program, run_ranks
from tests.ring.processes import run_in_processes

FROZEN_AT_LEAST = 100_000


def missing_in_a_rank() -> tuple[set[str], bool]:
    return set(preloaded()) - set(sys.modules), gc.get_freeze_count() > FROZEN_AT_LEAST


def test_ranks_start_with_all_that_is_preloaded():
    pytest.importorskip("megatron.core")
    assert run_in_processes(missing_in_a_rank, 1) == [(set(), True)]


PROGRAM = """
import atexit, gc, os, sys
atexit.register(print, "exit handlers run")
print(sorted(set({libraries}) - set(sys.modules)), gc.get_freeze_count() > {frozen})
print([name for name in sys.modules if name.startswith(("megatron", "tests."))], os.getcwd(), os.environ.get("GIVEN"))
sys.exit(int(os.environ.get("RANK", 3)))
"""


def test_programs_start_with_libraries_and_without_what_is_under_test(tmp_path):
    own_or_absent = ("tests.frozen", *(name for name in LIBRARIES if not find_spec(name.partition(".")[0])))
    libraries = [name for name in LIBRARIES if name not in own_or_absent]
    script = PROGRAM.format(libraries=libraries, frozen=FROZEN_AT_LEAST)
    run = run_program("-c", script, folder=tmp_path, environment={"GIVEN": "this"})
    assert run.stdout == f"[] True\n[] {tmp_path} this\nexit handlers run\n"
    assert run.status == 3


def test_a_rank_that_fails_ends_the_others():
    run = run_ranks(2, "-c", "import os, time; time.sleep(60) if os.environ['RANK'] == '0' else 1 / 0")
    assert run.statuses == [-signal.SIGTERM, 1]
    assert run.stderr.endswith("ZeroDivisionError: division by zero\n")
