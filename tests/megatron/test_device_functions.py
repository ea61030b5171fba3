"""Every function of torch that takes a device answers on the CPU while the stand-in for CUDA is in place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _device

from megatron_mtraining.testing import megatron_on_cpu
from megatron_mtraining.testing.megatron_on_cpu import device_functions

TENSOR = torch.tensor([1.0, 2.0, 3.0])
ZERO, BOUNDS, BLOCK = torch.tensor([0]), torch.tensor([0, 1]), torch.ones(1, 1, 1)
DEVICES = ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "as_nested_tensor": ([TENSOR],),
    "as_tensor": ([1.0],),
    "asarray": ([1.0],),
    "empty_permuted": ((2, 3), (1, 0)),
    "empty_strided": ((3, 2), (1, 3)),
    "from_dlpack": (TENSOR,),
    "full": ((3,), 7.0),
    "full_like": (TENSOR, 7.0),
    "is_pinned": (TENSOR,),
    "linspace": (0, 1, 3),
    "logspace": (0, 1, 3),
    "nested_tensor": ([TENSOR],),
    "new_empty_strided": (TENSOR, (3, 2), (1, 3)),
    "new_full": (TENSOR, (3,), 7.0),
    "new_tensor": (TENSOR, [1.0]),
    "normal": (0.0, 1.0, (3,)),
    "pin_memory": (TENSOR,),
    "randint": (5, (3,)),
    "randint_like": (TENSOR, 5),
    "range": (0, 3),
    "sparse_bsc_tensor": (BOUNDS, ZERO, BLOCK, (1, 1)),
    "sparse_bsr_tensor": (BOUNDS, ZERO, BLOCK, (1, 1)),
    "sparse_coo_tensor": (ZERO[None], torch.ones(1), (3,)),
    "sparse_csc_tensor": (BOUNDS, ZERO, torch.ones(1), (1, 1)),
    "sparse_csr_tensor": (BOUNDS, ZERO, torch.ones(1), (1, 1)),
    "tensor": ([1.0],),
    "to": (TENSOR,),
    "tril_indices": (3, 3),
    "triu_indices": (3, 3),
}
"""Of functions that want more than a number, or a tensor first and then a number."""

FUNCTIONS = [(owner.__name__, name) for owner, name, _ in device_functions()]


def call(owner: Any, name: str, folder: Any, *device: Any, **keywords: Any) -> Any:
    """The function with arguments that it understands, and a device."""
    if name == "from_file":
        torch.ones(3).numpy().tofile(folder / "numbers")
        return torch.from_file(str(folder / "numbers"), size=3, **keywords)
    if name == "empty_quantized":
        return torch.empty_quantized((3,), torch.quantize_per_tensor(TENSOR, 0.1, 0, torch.quint8), **keywords)
    if name == "sparse_compressed_tensor":
        return torch.sparse_compressed_tensor(*ARGUMENTS["sparse_csr_tensor"], layout=torch.sparse_csr, **keywords)
    first = (TENSOR,) if owner is torch.Tensor or name.endswith("_like") else ()
    numbers = () if name.endswith("_like") else (3,)
    return getattr(owner, name)(*ARGUMENTS.get(name, (*first, *numbers)), *device, **keywords)


@pytest.fixture(autouse=True)
def a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _device._device_constructors.cache_clear()  # as in a program that starts with the stand-in
    yield
    megatron_on_cpu.uninstall()


@pytest.fixture
def stand_in() -> None:
    megatron_on_cpu.install()


def test_the_table_holds_functions_of_every_source():
    assert {("torch", "empty_like"), ("torch", "asarray"), ("torch.nested", "as_nested_tensor")} <= set(FUNCTIONS)
    assert {("Tensor", "new_tensor"), ("Tensor", "to"), ("torch.fft", "fftfreq")} <= set(FUNCTIONS)
    assert not {name for _, name in FUNCTIONS} & {"cuda", "xpu", "set_default_device", "get_device_module"}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("owner", "name", "position"), device_functions(), ids=[".".join(ids) for ids in FUNCTIONS])
def test_a_gpu_asked_for_is_the_cpu(owner, name, position, tmp_path, stand_in):
    expected = call(owner, name, tmp_path)
    results = [call(owner, name, tmp_path, device=device) for device in (*DEVICES, torch.cuda.current_device())]
    if owner is torch.Tensor and position == 1:
        results += [call(owner, name, tmp_path, device) for device in DEVICES]
    for result in results:
        assert type(result) is type(expected)
        if isinstance(result, torch.Tensor):
            assert (result.device.type, result.dtype, result.layout) == ("cpu", expected.dtype, expected.layout)
            assert result.is_nested or result.shape == expected.shape


def test_other_devices_stay(stand_in):
    assert torch.empty_like(TENSOR, device="meta").is_meta
    assert TENSOR.new_zeros(2, device=torch.device("meta")).is_meta
    assert TENSOR.to(torch.float16).dtype == torch.float16


def test_the_current_device_is_a_number_and_a_device(stand_in):
    current = torch.cuda.current_device()
    assert torch.device("cuda", current) == torch.device(current) == torch.device(f"cuda:{current}")
    with torch.device(current):
        assert torch.zeros(2).device.type == "cpu"
    assert torch.nn.Linear(2, 2).to(current).weight.device.type == "cpu"
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device=current).weight.device.type == "cpu"


def test_a_device_is_what_it_was(stand_in):
    device = torch.device("cuda", 1)
    assert isinstance(device, torch.device) and isinstance(TENSOR.device, torch.device)
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == torch.device(type="cuda", index=1)
    assert torch.Generator(device="cuda").device.type == torch.Generator("cuda:0").device.type == "cpu"
    assert isinstance(torch.default_generator, torch.Generator)


def test_a_context_of_a_device_applies_as_without_the_stand_in(stand_in):
    """torch keeps its constructors where it first finds them: found as replaced, none would follow a context."""
    with torch.device("meta"):
        assert torch.nn.Linear(2, 2).weight.is_meta and torch.tensor([1]).is_meta
    with torch.device("cuda"):
        assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).device.type == "cpu"
    finally:
        torch.set_default_device(None)
    megatron_on_cpu.uninstall()
    with torch.device("meta"):
        assert torch.zeros(2).is_meta


def test_types_by_their_names_on_a_gpu(stand_in):
    assert torch.ones(2).type("torch.cuda.HalfTensor").type() == "torch.cuda.HalfTensor"
    assert torch.ones(2).type(torch.cuda.LongTensor).dtype == torch.int64
    assert torch.cuda.FloatTensor([1.0]).device.type == "cpu"
    assert isinstance(torch.ones(2), torch.cuda.FloatTensor)


def test_split_sizes_that_stay_tensors(stand_in):
    """On a GPU Megatron's dispatcher copies them to the host, as numbers; here nothing is on a GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        output = torch.zeros(3)
        dist.all_to_all_single(output, TENSOR, torch.tensor([3]), input_split_sizes=torch.tensor([3]))
        assert torch.equal(output, TENSOR)
    finally:
        dist.destroy_process_group()
