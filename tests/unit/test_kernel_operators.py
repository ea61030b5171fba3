"""How launchers become torch operators, on operators of this test that run on a CPU."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_mtraining.backends.cuda.registration import operator


@operator(mutates_args=("out", "final_out"), device_type="cpu")
def scaled_for_a_test(query: Tensor, out: Tensor | None, final_out: Tensor | None, scale: float, resume: bool) -> None:
    """Writes to the one that there is, as a kernel does: behind torch's back."""
    result = out if final_out is None else final_out
    result.numpy()[...] = query.numpy() * scale + (result.numpy() if resume else 0.0)


@operator(fake=lambda query, dtype: torch.empty_like(query, dtype=dtype), device_type="cpu")
def cast_for_a_test(query: Tensor, dtype: torch.dtype) -> Tensor:
    """A result of its own."""
    return torch.empty_like(query, dtype=dtype).copy_(query)


def test_schema_says_what_is_written_and_torch_agrees():
    query, out = torch.randn(3, 4), torch.zeros(3, 4)
    written = {argument.name: argument.is_write for argument in scaled_for_a_test._schema.arguments}
    assert written == {"query": False, "out": True, "final_out": True, "scale": False, "resume": False}
    for given in ((out, None), (None, out.half())):
        torch.library.opcheck(scaled_for_a_test, (query, *given, 2.0, True))
    torch.library.opcheck(cast_for_a_test, (query, torch.float16))


def test_version_counters_of_what_is_written_go_up():
    """So autograd notices a saved tensor that a later step wrote over."""
    query, out = torch.randn(3, 4), torch.zeros(3, 4)
    weight = torch.ones(3, 4, requires_grad=True)
    product = (weight * out).sum()
    before = query._version
    scaled_for_a_test(query, out, None, 2.0, False)
    assert torch.equal(out, query * 2.0)
    assert query._version == before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("fake", [False, True])
def test_an_operator_where_a_derivative_would_be_recorded_is_refused(fake):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
        query = torch.randn(3, 4, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"cast_for_a_test must not require gradients.* torch\.no_grad"):
            cast_for_a_test(query, torch.float16)
        with torch.no_grad():
            assert cast_for_a_test(query, torch.float16).dtype == torch.float16


# ---- memory that a kernel's arguments point to ----------------------------------------------------------------------

CUDA = Path(operator.__code__.co_filename).parent
NO_TENSOR = {"get_device", "numel", "stride", "len", "int", "num_column_tiles", "element_size", "size", "sum", "bool"}
"""Calls in an argument of a kernel's parameters that return no tensor."""


def temporaries(tree: ast.AST) -> list[str]:
    """Tensors that are made in an argument of a parameter struct: the struct has their address, and nobody has them."""
    found = []
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if not (call.func.attr.endswith("Params") or (call.func.attr == "set" and call.keywords)):
            continue
        for keyword in call.keywords:
            if keyword.arg is None:
                continue  # ** of a function of fields: see below
            for inner in ast.walk(keyword.value):
                if isinstance(inner, ast.Call) and name_of(inner) not in NO_TENSOR:
                    found.append(f"{call.func.attr}({keyword.arg}={ast.unparse(keyword.value)})")
    return found


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@pytest.mark.parametrize("path", sorted(CUDA.glob("*.py")), ids=lambda path: path.stem)
def test_no_argument_of_a_kernel_is_a_temporary(path):
    """A bitmask that was made in the argument went back to the allocator, which gave its memory to the workspace."""
    tree = ast.parse(path.read_text())
    assert not temporaries(tree)
    makers = {"empty", "empty_like", "new_empty", "zeros", "new_zeros", "zeros_like", "contiguous", "aligned", "to"}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name.lstrip("_").startswith("of_"):
            made = [name_of(inner) for inner in ast.walk(function) if isinstance(inner, ast.Call)]
            assert not makers & set(made), f"{function.name} returns the address of what it makes"


def test_a_temporary_is_found():
    source = "params = _C.AttentionParams(**of_query(query), bitmask=torch.empty(3), device=query.get_device())"
    assert temporaries(ast.parse(source)) == ["AttentionParams(bitmask=torch.empty(3))"]
