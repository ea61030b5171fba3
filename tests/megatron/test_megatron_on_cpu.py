"""The stand-in for CUDA leaves no trace, does nothing twice and never hides a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_mtraining.testing import megatron_on_cpu
from tests.programs import ROOT, run_program

WATCHED = ((torch, "zeros"), (torch.cuda, "current_device"), (torch.Tensor, "cuda"), (torch.nn.Module, "cuda"))


def symbols() -> list[object]:
    return [getattr(owner, name) for owner, name in WATCHED]


@pytest.fixture(autouse=True)
def a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    megatron_on_cpu.uninstall()


def test_everything_is_put_back():
    before, tensor_type = symbols(), torch.zeros(1).type()
    with megatron_on_cpu.megatron_on_cpu():
        assert not any(one is other for one, other in zip(symbols(), before, strict=True))
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert all(one is other for one, other in zip(symbols(), before, strict=True))
    assert torch.zeros(1).type() == tensor_type
    assert "type" not in vars(torch.Tensor)


def test_installing_twice_is_installing_once():
    megatron_on_cpu.install()
    once = symbols()
    megatron_on_cpu.install()
    with megatron_on_cpu.megatron_on_cpu():
        pass
    assert symbols() == once


def test_cuda_is_not_claimed_to_be_there():
    with megatron_on_cpu.megatron_on_cpu():
        assert not torch.cuda.is_available()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)])
def test_tensors_asked_for_on_a_gpu_are_on_the_cpu(device):
    with megatron_on_cpu.megatron_on_cpu():
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.tensor([1.0], device=device, pin_memory=True).cuda(non_blocking=True).device.type == "cpu"
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.zeros(2, device=torch.device(f"cuda:{torch.cuda.current_device()}")).device.type == "cpu"
        assert torch.zeros(2, device="meta").device.type == "meta"


def test_streams_and_events_are_answered():
    with megatron_on_cpu.megatron_on_cpu():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        event = stream.record_event()
        event.wait(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            assert event.query()


def test_there_is_no_accelerator_to_ask_for_streams(monkeypatch: pytest.MonkeyPatch):
    """A build of torch for CUDA names one where no GPU is, and Adam's step asked it for its current stream."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with megatron_on_cpu.megatron_on_cpu():
        assert torch.accelerator.current_accelerator() is None and not torch.accelerator.is_available()
        torch.optim.Adam([parameter]).step()


def test_the_random_state_is_the_cpus():
    with megatron_on_cpu.megatron_on_cpu():
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def test_the_megatron_beside_the_script_is_found_first(tmp_path: Path):
    """The stand-in imports Megatron before the launcher or the script can say where it is."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise SystemExit('the tree of the script')\n")
    (tmp_path / "train.py").touch()
    (tmp_path / "train").touch()
    on_cpu = ("-m", "megatron_mtraining.testing.megatron_on_cpu")
    launched = ["-m", "megatron_mtraining", tmp_path / "train.py", "--data-path", "beside.py"]
    for words in (["train.py"], ["train", "--data-path", ROOT / "setup.py"], launched):
        run = run_program(*on_cpu, *words, folder=tmp_path, environment=os.environ | {"PYTHONPATH": str(ROOT)})
        assert (run.status, run.stderr.strip()) == (1, "the tree of the script")


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="must be used where CUDA is not available, got a GPU. Run Megatron on it"):
        megatron_on_cpu.install()
