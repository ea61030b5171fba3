"""The optional CUDA build: what it says when it cannot be made, and the gate on what ptxas reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from megatron_mtraining.backends import cuda
from megatron_mtraining.backends.cuda.interface import BUILD_COMMAND, interface_digest
from megatron_mtraining.errors import BackendUnavailableError
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


@pytest.fixture
def compiled_module(monkeypatch):
    """A stand-in for the compiled module, without any operation."""
    module = ModuleType("megatron_mtraining.backends.cuda._C")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cuda, "_C", module, raising=False)
    cuda._check_build.cache_clear()
    yield module
    cuda._check_build.cache_clear()


@pytest.mark.parametrize("built", ["0123456789ab", None])
def test_a_build_of_other_sources_is_named_with_the_command_that_mends_it(compiled_module, built):
    if built is not None:
        compiled_module.interface = built
    with pytest.raises(BackendUnavailableError) as raised:
        cuda.cuda_backend()
    assert f"interface {interface_digest()}, got {built or 'an older one'}. Run `{BUILD_COMMAND}`" in str(raised.value)


def test_a_module_that_cannot_be_loaded_is_named_with_the_command_that_mends_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_mtraining.backends.cuda._C", None)  # what a failed import leaves
    monkeypatch.delattr(cuda, "_C", raising=False)
    cuda._check_build.cache_clear()
    with pytest.raises(BackendUnavailableError, match="The CUDA kernels cannot be loaded: ") as raised:
        cuda.cuda_backend()
    assert f"Run `{BUILD_COMMAND}` on a machine with nvcc." in str(raised.value)


def test_a_missing_module_is_named_with_the_command_that_mends_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = cuda.why_unavailable(device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=128, block_size=64)
    assert sentence == f"The CUDA kernels are not built. Run `{BUILD_COMMAND}` on a machine with nvcc."


def test_the_interface_changes_with_what_is_declared(tmp_path):
    assert interface_digest(tmp_path) is None
    for name in ("params.h", "launch.h", "bindings.cpp"):
        (tmp_path / name).write_text(name)
    before = interface_digest(tmp_path)
    (tmp_path / "params.h").write_text("another field")
    assert before is not None and interface_digest(tmp_path) not in (None, before)


def test_every_field_of_the_params_structs_has_its_name_in_python():
    unbound = {}
    for header in sorted((ROOT / "csrc").glob("*params.h")):
        text = re.sub(r"//[^\n]*", "", header.read_text())
        for struct in re.findall(r"void bind_fields\(Bind& bind, const (\w+)\*\)", text):
            body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.S)[1]
            declarations = [re.sub(r" = [^,]*", "", line) for line in body.split(";") if line.strip()]
            fields = {name for line in declarations for name in re.findall(r"(\w+)(?:,|$)", line.strip())}
            bound = re.search(rf"const {struct}\*\) \{{(.*?)\n\}}", text, re.S)[1]
            unbound[struct] = fields ^ set(re.findall(r"&P::(\w+)", bound))
    assert unbound and unbound == {struct: set() for struct in unbound}


def test_compile_commands_name_every_source(tmp_path):
    output = tmp_path / "compile_commands.json"
    command = [sys.executable, "setup.py", "-q", "compile_commands", f"--output={output}"]
    environment = os.environ | {"MTRAINING_CUDA": "0", "PATH": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    named = {entry["file"] for entry in json.loads(output.read_text())}
    assert named == {
        str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cu", ".cpp")
    }
