"""What every call of the CUDA kernels keeps: repeatability, strides, previous results, 64-bit offsets."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, sparse_attention
from megatron_mtraining.backends.cuda import cuda_backend
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.testing.error_budget import nan_filled_empty, run_with_gradients
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.types import AttentionOutput

from .cases import BLOCK, Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

CASE = Case(seq_len=1000, num_heads=4, num_kv_heads=2, head_dim=128)


def attention(index, **options):
    return lambda q, k, v: sparse_attention(q, k, v, index=index, config=MTrainingConfig(backend="cuda"), **options)


REPEATED = [
    CASE,
    Case(seq_len=1000, num_heads=4, num_kv_heads=1, head_dim=64, batch=2),
    Case(seq_len=1000, num_heads=8, num_kv_heads=2, head_dim=128, shares_lists=True),
]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_repeats_bit_for_bit(case):
    index, inputs, (grad_out, grad_lse) = case.index(), case.inputs(), case.gradients()
    first, *others = (
        run_with_gradients(attention(index), *inputs, grad_out=grad_out, grad_lse=grad_lse) for _ in range(5)
    )
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("head_dim", "shares_lists"), [(128, False), (128, True), (64, False), (64, True)])
def test_repeats_where_a_multiprocessor_has_many_tiles(head_dim, shares_lists):
    """The rows of a CTA's next tile go to shared memory while it works on this one: tiles must not mix."""
    case = Case(
        seq_len=65536,
        num_heads=16,
        num_kv_heads=2,
        head_dim=head_dim,
        max_vertical=500,
        max_slash=60,
        shares_lists=shares_lists,
    )
    index, inputs, (grad_out, _) = case.index(), case.inputs(), case.gradients()
    first, *others = (run_with_gradients(attention(index), *inputs, grad_out=grad_out) for _ in range(3))
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]), name


def test_strided_inputs_give_the_same_bits():
    index, (query, key, value), (grad_out, _) = CASE.index(), CASE.inputs(), CASE.gradients()
    expected = run_with_gradients(attention(index), query, key, value, grad_out=grad_out)
    wide = torch.randn(1, 1000, 4 + 2 + 2, 128 + 8, device="cuda").bfloat16()
    strided = []
    for tensor, heads in zip((query, key, value), wide.split([4, 2, 2], 2), strict=True):
        view = heads[..., 8:]
        view.copy_(tensor)
        strided.append(view)
    seq_first = grad_out.transpose(0, 1).contiguous().transpose(0, 1)
    ours = run_with_gradients(attention(index), *strided, grad_out=seq_first)
    for name, tensor in expected.items():
        assert torch.equal(tensor, ours[name]), name


def test_unaligned_rows_are_copied():
    case = Case(seq_len=300, num_heads=2, num_kv_heads=1, head_dim=64)
    index, (query, key, value) = case.index(), case.inputs()
    expected = attention(index)(query, key, value)
    buffer = torch.empty(query.numel() + 1, dtype=query.dtype, device="cuda")
    shifted = buffer[1:].view(query.shape)
    shifted.copy_(query)
    assert torch.equal(attention(index)(shifted, key, value).out, expected.out)


def test_sequence_first_inputs_are_taken_as_they_are():
    """Megatron's ``[seq, batch, heads, head_dim]``, whole or cut from one projection: no copies."""
    from megatron_mtraining.backends.cuda.params import aligned

    for batch in (1, 2):
        heads = torch.empty(300, batch, 4 + 2 + 2, 64, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
        for tensor in (heads, *heads.split([4, 2, 2], 2)):
            assert aligned(tensor) is tensor


def test_memory_of_a_forward(family):
    """One Hopper launch needs no float32 copy of out; the mma.sync family keeps one between its two passes."""
    case = Case(seq_len=8192, num_heads=8, num_kv_heads=2, head_dim=128)
    index, inputs = case.index(), case.inputs()
    attention(index)(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = attention(index)(*inputs)
    extra = torch.cuda.max_memory_allocated() - before - result.out.nbytes - result.lse.nbytes
    assert extra < {"sm90": 0.5, "sm80": 2.5}[family] * result.out.nbytes


def test_expanded_gradients_give_the_same_bits():
    """``sum().backward()`` hands in gradients of stride 0."""
    index, inputs = CASE.index(), CASE.inputs()
    ones = {"grad_out": torch.ones_like(inputs[0]), "grad_lse": torch.ones(1, 4, 1000, device="cuda")}
    expected = run_with_gradients(attention(index), *inputs, **ones)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = attention(index)(*leaves)
    (result.out.sum() + result.lse.sum()).backward()
    for name, leaf in zip(("grad_query", "grad_key", "grad_value"), leaves, strict=True):
        assert torch.equal(leaf.grad, expected[name]), name


def slash_only(case, previous, index=None):
    query, key, value = case.inputs()
    geometry = BlockGeometry.whole(seq_len=case.seq_len, block_size=BLOCK)
    index = case.index() if index is None else index
    backend = cuda_backend()
    options = {"softmax_scale": case.scale, "previous": previous, "is_last": False}
    return backend.forward(query, key, value, index, geometry, **options), (query, key, value, index)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_garbage_behind_an_empty_previous_row_is_ignored(head_dim):
    case = Case(seq_len=300, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    index = case.index()
    torch.manual_seed(0)
    expected, _ = slash_only(case, None, index)
    previous = AttentionOutput(
        torch.full((1, 300, 2, head_dim), torch.nan, device="cuda"), torch.full((1, 2, 300), -torch.inf, device="cuda")
    )
    torch.manual_seed(0)
    resumed, _ = slash_only(case, previous, index)
    assert torch.equal(resumed.out, expected.out)
    assert torch.equal(resumed.lse, expected.lse)


@pytest.mark.parametrize("gap", [-100.0, 100.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_previous_results_far_above_and_below(head_dim, gap):
    case = Case(seq_len=200, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    out = torch.randn(1, 200, 2, head_dim, device="cuda")
    lse = torch.full((1, 2, 200), gap, device="cuda")
    index = case.index()
    torch.manual_seed(0)
    alone, _ = slash_only(case, None, index)
    torch.manual_seed(0)
    merged, _ = slash_only(case, AttentionOutput(out.clone(), lse.clone()), index)
    exact = torch.logaddexp(lse.double(), alone.lse.double())
    weight = torch.exp(lse.double() - exact).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(merged.lse.double(), exact, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        merged.out.double(), weight * out.double() + (1 - weight) * alone.out.double(), rtol=1e-2, atol=1e-2
    )


def test_rows_without_keys():
    """Queries of block 5 against keys of blocks 6 and 7: out 0, lse -inf; gradients are 0, or what was there before.

    In a first step too, where what the index has of verticals lies in slashes.
    """
    case = Case(seq_len=512, num_heads=2, num_kv_heads=1, head_dim=64)
    query, key, value = (tensor[:, : 64 * n] for tensor, n in zip(case.inputs(), (1, 2, 2), strict=True))
    geometry = BlockGeometry(
        seq_len=512, block_size=BLOCK, query_blocks=torch.tensor([5]), key_blocks=torch.tensor([6, 7])
    )
    lists = [[[0, 70, 200]] * 2], [[list(range(8))] * 2]
    index = VerticalSlashIndex.from_lists(*lists, seq_len=512).to("cuda")
    packed = torch.randn(2, 1, 2, 3, 64, device="cuda", dtype=query.dtype)
    backend = cuda_backend()
    held, grad_out = (query, key, value), torch.ones_like(query)
    for is_last in (False, True):
        options = {"softmax_scale": 0.1, "is_last": is_last}
        with nan_filled_empty():
            first = backend.forward(*held, index, geometry, packed=packed, **options)
            later = backend.forward(*held, index, geometry, previous=None, **options)
        for result in (first, later):
            assert torch.equal(result.out, torch.zeros_like(result.out))
            assert torch.equal(result.lse, torch.full_like(result.lse, -torch.inf))
        given = (later.lse, torch.zeros_like(later.lse), index, geometry)
        ones = torch.ones(query.shape, device="cuda")
        with nan_filled_empty():
            alone, *others = backend.backward(grad_out, *held, *given, packed=packed, **options)
            fresh, fresh_keys, _ = backend.backward(grad_out, *held, *given, previous=None, **options)
            added, later_keys, _ = backend.backward(grad_out, *held, *given, previous=ones, **options)
        assert not any(grad.any() for grad in (alone, *others, fresh, fresh_keys, later_keys))
        assert torch.equal(added, torch.ones_like(added))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_last_step_rounds_what_a_step_would_hand_on(head_dim):
    """Bit for bit, in the dtype of the inputs: alone and after an earlier step, rows without keys among them."""
    case = Case(seq_len=700, num_heads=4, num_kv_heads=2, head_dim=head_dim, max_vertical=40, max_slash=2)
    index, inputs, (grad_out, delta) = case.index(), case.inputs(), case.gradients()
    whole = BlockGeometry.whole(seq_len=700, block_size=BLOCK)
    odd = torch.arange(1, 11, 2)
    rows = (odd[:, None] * BLOCK + torch.arange(BLOCK)).flatten().cuda()
    later_keys = (inputs[0], *(tensor[:, rows] for tensor in inputs[1:]))
    some = BlockGeometry(seq_len=700, block_size=BLOCK, query_blocks=torch.arange(11), key_blocks=odd)
    backend = cuda_backend()
    packed = backend.pack(*inputs[1:], index, whole)
    steps = []
    for is_last in (False, True):
        options = {"softmax_scale": case.scale, "is_last": is_last}
        with nan_filled_empty():
            result = backend.forward(*inputs, index, whole, packed=packed, **options)
            before = AttentionOutput(torch.ones(inputs[0].shape, device="cuda"), result.lse.clone())
            later = backend.forward(*later_keys, index, some, previous=before, **options)
            statistics = (result.lse, delta, index)
            grad, *_ = backend.backward(grad_out, *inputs, *statistics, whole, packed=packed, **options)
            ones = torch.ones(inputs[0].shape, device="cuda")
            later_grad, *_ = backend.backward(grad_out, *later_keys, *statistics, some, previous=ones, **options)
        steps.append((result.out, result.lse, later.out, later.lse, grad, later_grad))
    for handed_on, last in zip(*steps, strict=True):
        assert handed_on.dtype == torch.float32
        assert torch.equal(handed_on.to(last.dtype), last)
    assert steps[1][0].dtype == steps[1][2].dtype == steps[1][4].dtype == steps[1][5].dtype == case.dtype


def test_operators_pass_opcheck(family):
    from megatron_mtraining.backends.cuda import operators
    from megatron_mtraining.backends.cuda.geometry import device_geometry

    case = Case(seq_len=130, num_heads=2, num_kv_heads=1, head_dim=64)
    index, (query, key, value), (grad_out, delta) = case.index(), case.inputs(), case.gradients()
    geometry = BlockGeometry.whole(seq_len=130, block_size=BLOCK)
    tables = device_geometry(geometry, query.device)
    packed = ReferenceBackend().pack(key, value, index, geometry)
    grad_keys, grad_packed = torch.zeros(2, *key.shape, device="cuda"), torch.zeros(packed.shape, device="cuda")
    partial, final = torch.zeros(query.shape, device="cuda"), torch.empty_like(query)
    lse = torch.zeros(1, 2, 130, device="cuda")
    slashes = (index.slash, index.num_slash)
    lists = (index.vertical, index.num_vertical, *slashes)
    held, statistics, scale = (query, key, value), (lse, delta), 0.125
    maps = (tables.query_tiles, tables.document_tiles, tables.key_slots)
    for given in ((partial, None), (None, final)):
        torch.library.opcheck(operators.forward, (*held, packed, *lists, *maps, *given, lse, scale, family))
    maps = (tables.query_tiles, tables.key_slots)
    given = (partial, final)
    torch.library.opcheck(operators.slash_forward, (*held, *slashes, *maps, *given, lse, scale, True, family))
    slots = (tables.query_slots, tables.key_slots)
    maps = (tables.query_tiles, tables.key_tiles, tables.document_tiles, *slots)
    given = (grad_out, *held, packed, *statistics)
    results = (None, final, grad_keys, grad_packed)
    torch.library.opcheck(operators.backward, (*given, *lists, *maps, *results, scale, family))
    maps = (tables.query_tiles, tables.key_tiles, *slots)
    given = (grad_out, *held, *statistics)
    results = (partial, None, grad_keys)
    torch.library.opcheck(operators.slash_backward, (*given, *slashes, *maps, *results, scale, True, family))


def test_the_bitmask_is_the_mask_of_the_definition():
    """Bit for bit: a column is usable when it is a vertical of an earlier block and in no slash."""
    from megatron_mtraining.backends.cuda import _C, operators
    from megatron_mtraining.backends.cuda.geometry import device_geometry
    from megatron_mtraining.backends.cuda.params import current_stream, num_column_tiles, of_query, of_tables

    case = Case(seq_len=625, num_heads=3, num_kv_heads=1, head_dim=64)
    index = case.index()
    geometry = BlockGeometry.whole(seq_len=625, block_size=BLOCK)
    query = case.inputs()[0]
    tiles, max_vertical = device_geometry(geometry, query.device).query_tiles, index.vertical.shape[-1]
    names = ("vertical", "num_vertical", "slash", "num_slash")
    bitmask = operators.empty_bitmask(query, index.vertical, tiles)
    params = _C.AttentionParams(
        **of_query(query, tiles, 1.0),
        **of_tables(1, **{name: getattr(index, name) for name in names}),
        num_blocks=geometry.num_blocks,
        max_vertical=max_vertical,
        num_column_tiles=num_column_tiles(max_vertical),
        vertical_bitmask=bitmask,
    )
    _C.fill_vertical_bitmask(params, current_stream(query.get_device()))
    bits = ((bitmask[..., None] >> torch.arange(64, device="cuda")) & 1).bool().flatten(3)[0].cpu()
    slash_mask = allowed_mask(
        VerticalSlashIndex(
            torch.full_like(index.vertical, 625), torch.zeros_like(index.num_vertical), index.slash, index.num_slash
        ),
        seq_len=625,
    )[0]
    for head in range(3):
        for column in range(bits.shape[-1]):
            counts = column < int(index.num_vertical[0, head])
            position = int(index.vertical[0, head, column]) if counts else 0
            for block in range(10):
                in_slash = bool(slash_mask[head, min(block * 64 + 63, 624), position])
                assert bool(bits[head, block, column]) == (counts and position // 64 < block and not in_slash)


def test_parameters_keep_their_tensors():
    """Else the memory of a temporary would be used again before its kernels ran."""
    from megatron_mtraining.backends.cuda import _C

    first, second = (torch.ones(1, 2, 4, device="cuda") for _ in range(2))
    alive = weakref.ref(first)
    params = _C.AttentionParams(delta=first, batch=1)
    del first
    gc.collect()
    assert alive() is not None
    params.set(delta=second)
    assert alive() is None
    alive = weakref.ref(second)
    del second, params
    assert alive() is None


@pytest.mark.parametrize("magnitude", [1.0, 8.0])
def test_a_bitmask_as_large_as_the_workspace(magnitude):
    """As many column tiles as a tile has rows: what frees the bitmask early sees it written over by the workspace."""
    sizes = {"num_heads": 36, "num_kv_heads": 4, "head_dim": 64, "max_vertical": 4096, "max_slash": 8}
    case = Case(seq_len=4096, magnitude=magnitude, **sizes)
    index, inputs, (grad_out, grad_lse) = case.index(), case.inputs(), case.gradients()
    reference = MTrainingConfig(backend="reference")
    expected = run_with_gradients(
        lambda q, k, v: sparse_attention(q, k, v, index=index, config=reference),
        *(tensor.float() for tensor in inputs),
        grad_out=grad_out.float(),
        grad_lse=grad_lse,
    )
    found = run_with_gradients(attention(index), *inputs, grad_out=grad_out, grad_lse=grad_lse)
    for name, tensor in found.items():
        assert (tensor.float() - expected[name]).abs().max() <= 0.05 * expected[name].abs().max(), name


def test_more_than_two_to_the_31_elements():
    """Tokens * heads * head_dim past 2**31, forward and backward: sampled rows against float64."""
    seq_len, heads, dim = 2**21 + 1, 16, 64
    query = torch.randn(1, seq_len, heads, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    key, value = (torch.randn(1, seq_len, 1, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lists = [[[0, 70, 2**20 + 5]] * heads], [[[0, 2]] * heads]
    index = VerticalSlashIndex.from_lists(*lists, seq_len=seq_len, device="cuda")
    result = sparse_attention(query, key, value, index=index, config=MTrainingConfig(backend="cuda"))
    rows = [0, 64, 129, 2**20 + 77, seq_len - 65, seq_len - 1]
    grad_out = torch.zeros_like(result.out)
    grad_out[:, rows] = 1.0
    result.out.backward(grad_out)
    for row in rows:
        block = row // 64
        keys = {k for d in (0, 2) for k in range((block - d) * 64, (block - d) * 64 + 64) if 0 <= k <= row}
        keys |= {k for k in (0, 70, 2**20 + 5) if k <= row}
        keys = torch.tensor(sorted(keys), device="cuda")
        exact_query = query.detach()[0, row].double().requires_grad_()
        scores = exact_query @ key[0, keys, 0].double().T * dim**-0.5
        exact = torch.softmax(scores, -1) @ value[0, keys, 0].double()
        exact.sum().backward()
        torch.testing.assert_close(result.out[0, row].double(), exact, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(result.lse[0, :, row].double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(query.grad[0, row].double(), exact_query.grad, rtol=2e-2, atol=2e-2)
