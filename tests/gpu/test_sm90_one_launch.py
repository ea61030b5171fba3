"""Slashes and verticals in one launch: for queries, keys and packs in hand together, on the Hopper kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.ops.geometry import BlockGeometry
from megatron_mtraining.ops.gradients import zero_accumulators
from megatron_mtraining.ops.vertical import pack_vertical, unpack_vertical_grad
from megatron_mtraining.testing.error_budget import assert_all_within_budget, plain_attention, run_with_gradients
from megatron_mtraining.testing.oracle import oracle_attention

from .cases import BLOCK, Case

pytestmark = pytest.mark.gpu

CASES = [
    Case(seq_len=1100, num_heads=4, num_kv_heads=2, head_dim=128),
    Case(seq_len=833, num_heads=2, num_kv_heads=1, head_dim=64, batch=2, dtype=torch.float16),
    Case(seq_len=1000, num_heads=2, num_kv_heads=2, head_dim=96, bounds=(0, 100, 101, 101, 640, 1000)),
]


@pytest.fixture(autouse=True)
def hopper():
    from megatron_mtraining.kernels.operators import families

    if "sm90" not in families(torch.device("cuda")):
        pytest.skip(f"the sm90 kernels run on another GPU than {torch.cuda.get_device_name()}")


def one_launch(
    case: Case, query: Tensor, key: Tensor, value: Tensor, index: VerticalSlashIndex, grad_out: Tensor, grad_lse: Tensor
) -> dict[str, Tensor]:
    """Forward and backward, each in one launch; what run_with_gradients returns."""
    from megatron_mtraining.kernels import _C
    from megatron_mtraining.kernels import params as fields
    from megatron_mtraining.kernels.geometry import device_geometry
    from megatron_mtraining.kernels.operators import _launch, fill_words

    geometry = BlockGeometry.whole(seq_len=case.seq_len, block_size=BLOCK, documents=case.documents)
    tables = device_geometry(geometry, query.device)
    packed = pack_vertical(key, value, index, geometry)
    params = fields.attention_params(query, case.scale, tables.query_tiles, geometry.num_blocks)
    fields.set_keys(params, key, value)
    fields.set_packed(params, *packed, tables.document_tiles)
    lists = {name: getattr(index, name) for name in ("vertical", "num_vertical", "slash", "num_slash")}
    fields.set_tables(params, **lists)
    words = fill_words(params, query)
    params.key_tiles, params.num_key_tiles = tables.key_tiles.data_ptr(), tables.key_tiles.shape[0]
    params.query_slots, params.key_slots = tables.query_slots.data_ptr(), tables.key_slots.data_ptr()
    out = torch.full(query.shape, torch.nan, device="cuda")
    lse = torch.full((query.shape[0], query.shape[2], query.shape[1]), torch.nan, device="cuda")
    fields.set_output(params, out, lse, resume=False)
    _launch("sm90", _C.Operation.forward, params, query, keep=words)

    delta = (grad_out.float() * out).sum(-1).transpose(1, 2).contiguous() - grad_lse
    grads, grads_packed = zero_accumulators(query, key, value), zero_accumulators(*packed)
    fields.set_gradients(params, grad_out, lse, delta, grads[0])
    params.grad_key, params.grad_value = fields.rows(grads[1]), fields.rows(grads[2])
    params.grad_packed_key, params.grad_packed_value = (fields.packed_rows(grad) for grad in grads_packed)
    _launch("sm90", _C.Operation.backward, params, query, keep=words)
    unpack_vertical_grad(*grads_packed, index, geometry, grad_key=grads[1], grad_value=grads[2])
    names = ("out", "grad_query", "grad_key", "grad_value")
    results = dict(zip(names, (x.to(query.dtype) for x in (out, *grads)), strict=True))
    return {**results, "lse": lse}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_definition(case):
    index, inputs, (grad_out, grad_lse) = case.index(), case.inputs(), case.gradients()
    ours = one_launch(case, *inputs, index, grad_out, grad_lse)
    whole = {"index": index, "softmax_scale": case.scale, "cu_seqlens": case.cu_seqlens}
    given = {"grad_out": grad_out, "grad_lse": grad_lse}
    low = run_with_gradients(partial(plain_attention, **whole), *inputs, **given)
    exact = run_with_gradients(partial(oracle_attention, **whole), *(x.double() for x in inputs), **given)
    assert_all_within_budget(ours, low, exact, case=str(case))


def test_repeats_bit_for_bit():
    case = CASES[0]
    index, inputs, gradients = case.index(), case.inputs(), case.gradients()
    first, second = (one_launch(case, *inputs, index, *gradients) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
