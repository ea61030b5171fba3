"""A backward in two launches, that over keys first, gives the bits of one launch, and hands them on in between."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.backends.cuda import cuda_backend
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.testing.error_budget import nan_filled_empty

from .cases import BLOCK, Case
from .test_cuda_block_lists import random_lists

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

CASES = [
    Case(seq_len=1000, num_heads=4, num_kv_heads=2, head_dim=128),
    Case(seq_len=449, num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16, shares_lists=True),
]


def gradients_both_ways(backward):
    """What ``backward`` returns in one launch; in two; and what these hand on, copied as it is handed on."""
    handed_on = []

    def note(*grads):
        handed_on.extend(None if each is None else each.clone() for each in grads)

    with nan_filled_empty():
        return backward(on_kv_gradients=None), backward(on_kv_gradients=note), handed_on


def check(together, apart, handed_on):
    assert len(together) == len(apart) == 1 + len(handed_on)
    for one, other in zip((*together, *together[1:]), (*apart, *handed_on), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_first_and_later_steps(case, is_last):
    backend, geometry = cuda_backend(), BlockGeometry.whole(seq_len=case.seq_len, block_size=BLOCK)
    index, (query, key, value), (grad_out, grad_lse) = case.index(), case.inputs(), case.gradients()
    packed = backend.pack(key, value, index, geometry)
    options = {"softmax_scale": case.scale, "is_last": is_last}
    whole = {"softmax_scale": case.scale, "packed": packed, "is_last": True}
    out, lse = backend.forward(query, key, value, index, geometry, **whole)
    rows = (lse, backend.softmax_delta(grad_out, out, grad_lse), index, geometry)
    previous = torch.randn(query.shape, device="cuda")

    def first(**way):
        return backend.backward(grad_out, query, key, value, *rows, packed=packed, **options, **way)

    def later(**way):
        given = {"previous": previous.clone(), **options, **way}
        return backend.backward(grad_out, query, key, value, *rows, **given)

    check(*gradients_both_ways(first))
    check(*gradients_both_ways(later))


def test_block_lists():
    case = CASES[0]
    backend, geometry = cuda_backend(), BlockGeometry.whole(seq_len=case.seq_len, block_size=BLOCK)
    index, (query, key, value), (grad_out, grad_lse) = random_lists(case, 4, 2, True), case.inputs(), case.gradients()
    options = {"softmax_scale": case.scale, "previous": None, "is_last": True}
    out, lse = backend.forward(query, key, value, index, geometry, **options)
    rows = (lse, backend.softmax_delta(grad_out, out, grad_lse), index, geometry)

    def backward(**way):
        return backend.backward(grad_out, query, key, value, *rows, **options, **way)

    check(*gradients_both_ways(backward))
