"""Tables that a call leaves for later ones are of use to any of these, whatever mode the first call ran in."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_mtraining.ops.geometry import BlockGeometry
from megatron_mtraining.tensors import kept_tensors

from ..project.sources import PACKAGE


@pytest.mark.parametrize("transform", ["fake", "functionalize", "grad"])
def test_what_stands_for_memory_is_not_kept(transform):
    def first_call(x):
        BlockGeometry.whole(seq_len=7 * 13, block_size=13)
        return x.sum()

    if transform == "fake":
        with FakeTensorMode():
            first_call(torch.zeros(1))
    else:
        getattr(torch.func, transform)(first_call)(torch.zeros(1))
    blocks = BlockGeometry.whole(seq_len=7 * 13, block_size=13).query_blocks
    assert blocks.tolist() == list(range(7)) and blocks.numpy().sum() == 21
    assert BlockGeometry.whole(seq_len=7 * 13, block_size=13).query_blocks is blocks


def test_tables_on_a_gpu_are_of_one_stream(monkeypatch):
    """Another one has not seen the copy, and must not go on reading what was handed out again on the first."""
    stream, capturing = SimpleNamespace(cuda_stream=0), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))

    @kept_tensors(maxsize=4)
    def made(size: int, device: torch.device) -> list[int]:
        return [size]

    gpu = torch.device("cuda", 0)
    first = made(3, gpu)
    stream.cuda_stream = 1
    second = made(3, gpu)
    assert second is not first and made(3, gpu) is second
    capturing.append(True)
    assert made(3, gpu) is second
    with pytest.raises(RuntimeError, match="CUDA graph must be captured on a stream on which the same call ran before"):
        made(4, gpu)


def test_no_other_cache_holds_tensors():
    """A function that remembers by ``functools`` says in its annotation what it gives, and that holds no tensor."""
    plain = {"None", "bool", "int", "str", "type", "Any", "tuple[int, int]", "tuple[int, ...]", "tuple[str, ...]"}
    plain |= {"SequenceLayout", "RingSchedule"}
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    for path, source in ((path, source) for path, source in sources.items() if "cache" in source):
        for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
            if any("cache" in ast.unparse(each) for each in function.decorator_list):
                assert ast.unparse(function.returns) in plain or function.name == "kept", (path.name, function.name)
