"""Tables that a call leaves for later ones are of use to any of these, whatever mode the first call ran in."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_mtraining.backends import geometry
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.tensors import cached_tensors

from ..project.sources import PACKAGE


@pytest.mark.parametrize("transform", ["fake", "functionalize"])
def test_what_stands_for_memory_is_not_kept(transform):
    geometry._first_blocks.cache_clear()  # of what another test has kept

    def first_call(x):
        BlockGeometry.whole(seq_len=7 * 13, block_size=13)
        return x.sum()

    if transform == "fake":
        with FakeTensorMode():
            first_call(torch.zeros(1))
    else:
        torch.func.functionalize(first_call)(torch.zeros(1))
    blocks = BlockGeometry.whole(seq_len=7 * 13, block_size=13).query_blocks
    assert blocks.tolist() == list(range(7)) and blocks.numpy().sum() == 21
    assert BlockGeometry.whole(seq_len=7 * 13, block_size=13).query_blocks is blocks


class Stream:
    """Of a GPU: what it waits for, and the event that it records."""

    def __init__(self, event):
        self.event, self.waited_for = event, []

    def record_event(self):
        return self.event

    def wait_event(self, event):
        self.waited_for.append(event)


def test_streams_come_after_the_copy_of_a_table(monkeypatch):
    """As long as it has not happened; while a graph is captured nothing is asked, nor a table made."""
    there, capturing, asked = [], [], []
    event = SimpleNamespace(query=lambda: asked.append(1) or bool(there))
    stream = Stream(event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))

    @cached_tensors(maxsize=4)
    def made(size: int, device: torch.device) -> list[int]:
        return [size]

    gpu = torch.device("cuda", 0)
    first = made(3, gpu)
    assert made(3, gpu) is first and stream.waited_for == [event, event]
    capturing.append(True)
    assert made(3, gpu) is first and len(asked) == 2
    with pytest.raises(RuntimeError, match="A CUDA graph must be captured behind the same call, which makes tables"):
        made(4, gpu)
    capturing.clear()
    there.append(True)
    assert made(3, gpu) is made(3, gpu) is first
    assert stream.waited_for == [event, event] and len(asked) == 3


def test_no_other_cache_holds_tensors():
    """A function that remembers by ``functools`` says in its annotation what it gives, and that holds no tensor."""
    plain = {"None", "bool", "int", "str", "type", "Any", "tuple[int, int]", "tuple[int, ...]", "tuple[str, ...]"}
    plain |= {
        "SequenceLayout",
        "RingSchedule",
        "MTrainingConfig",
        "tuple[tuple[Candidate, ...], str]",
        "np.ndarray",
        "tuple[np.ndarray, np.ndarray]",
    }
    plain |= {"tuple[tuple[Candidate, ...], str]", "tuple[str, Profile]"}
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    for path, source in ((path, source) for path, source in sources.items() if "cache" in source):
        for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
            decorators = [ast.unparse(each) for each in function.decorator_list]
            if any("cache" in each and "cached_tensors" not in each for each in decorators):
                assert ast.unparse(function.returns) in plain or function.name == "cached", (path.name, function.name)
