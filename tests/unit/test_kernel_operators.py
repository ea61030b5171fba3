"""How launchers become torch operators, on operators of this test that run on a CPU."""

from __future__ import annotations

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
