"""The optional CUDA build: what it says when it cannot be made, and the gate on what ptxas reports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools.kernels_report import KernelReport, parse

from .sources import ROOT

PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_80'
ptxas info    : Function properties for _Z5firstv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 128 bytes smem, 1000 bytes cmem[0]
ptxas info    : Compile time = 1.000 ms
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90a'
ptxas info    : Function properties for _Z6secondv
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""


def test_report_reads_what_ptxas_prints():
    assert parse(PTXAS_LOG) == [
        KernelReport("_Z5firstv", "sm_80", registers=168, shared_bytes=128),
        KernelReport("_Z6secondv", "sm_90a", registers=255, stack_bytes=16, spill_bytes=32),
    ]


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("1", "nvcc must be on PATH or under CUDA_HOME when MTRAINING_CUDA=1, got neither. Install the CUDA toolkit"),
        ("yes", "MTRAINING_CUDA must be 0, 1 or unset, got 'yes'."),
    ],
)
def test_setup_refuses_in_one_sentence(choice, sentence):
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_HOME"}
    environment |= {"PATH": "", "MTRAINING_CUDA": choice}
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert sentence in result.stderr
