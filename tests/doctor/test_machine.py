"""The page on a machine: everything named that is there, what is missing said, nothing else on the standard output."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_mtraining.doctor import machine
from megatron_mtraining.doctor.machine import page_of
from megatron_mtraining.errors import BackendUnavailableError
from tests.programs import ROOT, run_program


@pytest.fixture(scope="module")
def found() -> dict:
    ended = run_program("-m", "megatron_mtraining", "doctor", "--json")
    assert ended.status == 0, ended.stderr[-3000:]
    assert ended.stdout.count("\n") == 1
    return json.loads(ended.stdout)


def test_versions_and_targets_are_named(found: dict):
    assert found["megatron"]["version"]
    assert found["megatron"]["missing"] == []
    assert "megatron.core.models.gpt.gpt_model.GPTModel" in found["megatron"]["wrapped"]
    table = "megatron.core.models.common.embeddings.rope_utils.get_pos_emb_on_this_cp_rank"
    assert table in found["megatron"]["replaced"]
    assert found["auto"]["96"] == {
        "backend": "reference",
        "why": "The CUDA kernels need tensors on a GPU, got cpu. Move them there, or use backend='reference'.",
    }


def test_the_page_says_what_is_missing(found: dict):
    page = page_of(found)
    assert "GPUs                none" in page
    assert "apex                not installed" in page or found["beside_megatron"]["apex"]
    assert "No fault found." in page


def empty_megatron(folder: Path, core: str) -> dict[str, str]:
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "__init__.py").touch()
    (folder / "megatron" / "core" / "__init__.py").write_text(core)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def test_a_megatron_of_another_age_is_a_fault(tmp_path: Path):
    ended = run_program("-m", "megatron_mtraining", "doctor", environment=empty_megatron(tmp_path, ""))
    assert ended.status == 1
    assert "FAULT: Megatron-Core must be a supported release, got " in ended.stdout


def test_no_megatron_is_no_fault(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(machine.importlib, "import_module", missing)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    found = machine.describe()
    assert machine.faults_of(found) == []
    assert "Megatron-Core       not installed, and not on PYTHONPATH" in page_of(found)
    assert "flash_attn          not installed" in page_of(found)


def test_what_a_gpu_host_has_is_on_the_page(found: dict):
    device = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8}
    gpus = {"devices": [device, device], "peer_access": [[True, False], [False, True]], "links": "GPU0 GPU1\nX NV18"}
    kernels = {"built": True, "build": "nvcc=13.0.88;targets=sm_80", "fault": None, "remedy": None}
    page = page_of(found | {"gpus": gpus, "kernels": kernels})
    assert "GPU 1               NVIDIA H200, compute capability 9.0, 139.8 GiB" in page
    assert "peer access         none between GPUs 0-1" in page
    assert "X NV18" in page
    assert "built: nvcc=13.0.88;targets=sm_80" in page


def test_kernels_that_cannot_be_used_are_a_fault(found: dict, monkeypatch: pytest.MonkeyPatch):
    def stale() -> None:
        raise BackendUnavailableError("The CUDA kernels must be built from the sources beside them.")

    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(machine.cuda, "cuda_backend", stale)
    kernels = machine._kernels()
    assert machine.faults_of(found | {"kernels": kernels}) == [kernels["fault"]]
