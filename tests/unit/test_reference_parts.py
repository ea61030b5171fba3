"""A backend's operations on parts of the keys: any blocks in any order, one after the other or several at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.tensors import accumulate_dtype
from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    gradient_rounding,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import allowed_mask, oracle_attention
from megatron_mtraining.types import AttentionOutput, Documents, VerticalSlashIndex

from .attention_inputs import as_cu_seqlens, random_index, random_inputs

SIZE, SEQ_LEN = 4, 64
NUM_BLOCKS = SEQ_LEN // SIZE
BOUNDS = [0, 0, 5, 33, 34, 64]
BACKEND = ReferenceBackend()

SPLITS = {
    "one-call": [range(NUM_BLOCKS)],
    "two-halves": [range(8), range(8, 16)],
    "later-half-first": [range(8, 16), range(8)],
    "reversed-blocks": [range(15, -1, -1)],
    "striped": [range(rank, NUM_BLOCKS, 4) for rank in range(4)],
    "two-ranks-end-to-end": [[*range(1, 16, 4), *range(0, 16, 4)], [*range(3, 16, 4), *range(2, 16, 4)]],
    "one-block-each": [[block] for block in range(NUM_BLOCKS)],
}


def tokens_of(blocks: Sequence[int]) -> Tensor:
    """Positions of the tokens of some blocks, in that order."""
    return (torch.tensor(list(blocks))[:, None] * SIZE + torch.arange(SIZE)).flatten()


def forward_in_parts(
    inputs: Sequence[Tensor], index: VerticalSlashIndex, geometries: Sequence[BlockGeometry]
) -> AttentionOutput:
    """Verticals and the slashes of the first geometry, then the slashes of each other one; keys of its key blocks."""
    query, key, value = inputs
    whole = BlockGeometry.whole(seq_len=SEQ_LEN, block_size=SIZE, documents=geometries[0].documents)
    packed = ReferenceBackend().pack(key, value, index, whole)
    at = tokens_of(geometries[0].key_blocks.tolist())
    scale = query.shape[-1] ** -0.5
    held = (query, key[:, at], value[:, at])
    first = BACKEND.forward(*held, index, geometries[0], softmax_scale=scale, packed=packed, is_last=False)
    return slashes_in_parts(inputs, index, geometries[1:], previous=first)


def slashes_in_parts(
    inputs: Sequence[Tensor],
    index: VerticalSlashIndex,
    geometries: Sequence[BlockGeometry],
    *,
    previous: AttentionOutput | None,
) -> AttentionOutput | None:
    """``previous``, then the slashes of each geometry, over the tokens of its key blocks."""
    query, key, value = inputs
    for geometry in geometries:
        at = tokens_of(geometry.key_blocks.tolist())
        previous = BACKEND.forward(
            query,
            key[:, at],
            value[:, at],
            index,
            geometry,
            softmax_scale=query.shape[-1] ** -0.5,
            previous=previous,
            is_last=False,
        )
    return previous


def backward_in_parts(
    inputs: Sequence[Tensor],
    index: VerticalSlashIndex,
    geometries: Sequence[BlockGeometry],
    result: AttentionOutput,
    grad_out: Tensor,
    grad_lse: Tensor,
) -> dict[str, Tensor]:
    """The gradients of :func:`forward_in_parts`, that of the queries passed on from part to part."""
    query, key, value = inputs
    whole = BlockGeometry.whole(seq_len=SEQ_LEN, block_size=SIZE, documents=geometries[0].documents)
    scale = query.shape[-1] ** -0.5
    packed = ReferenceBackend().pack(key, value, index, whole)
    dtype = accumulate_dtype(key.dtype)
    grad_keys = torch.zeros(2, *key.shape, dtype=dtype)
    grad_query = None
    common = (result.lse, ReferenceBackend().softmax_delta(grad_out, result.out, grad_lse), index)
    for geometry in geometries:
        at = tokens_of(geometry.key_blocks.tolist())
        given = (grad_out, query, key[:, at], value[:, at])
        options = {"softmax_scale": scale, "is_last": False}
        if grad_query is None:
            grad_query, part, grad_packed = BACKEND.backward(*given, *common, geometry, packed=packed, **options)
        else:
            grad_query, part, none = BACKEND.backward(*given, *common, geometry, previous=grad_query, **options)
            assert none is None
        grad_keys[:, :, at] += part
    grad_key, grad_value = ReferenceBackend().unpack(grad_packed, index, whole, grad_kv=grad_keys, dtype=dtype)
    return {"grad_query": grad_query, "grad_key": grad_key, "grad_value": grad_value}


def split_geometries(split: str, documents: Documents | None, query_blocks: Sequence[int]) -> list[BlockGeometry]:
    return [
        BlockGeometry(
            seq_len=SEQ_LEN,
            block_size=SIZE,
            query_blocks=torch.tensor(list(query_blocks)),
            key_blocks=torch.tensor(list(blocks)),
            documents=documents,
        )
        for blocks in SPLITS[split]
    ]


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["batch", "documents"])
@pytest.mark.parametrize("split", SPLITS)
def test_parts_make_the_whole(split: str, bounds: list[int] | None) -> None:
    """However the keys are cut, forward and backward over the parts are the oracle's."""
    batch, rows = (2, 2) if bounds is None else (1, len(bounds) - 1)
    index = random_index(rows, 4, SEQ_LEN, SIZE, cu_seqlens=bounds)
    inputs = random_inputs(batch, SEQ_LEN, 4, 2, 8)
    geometries = split_geometries(split, None if bounds is None else Documents(tuple(bounds)), range(NUM_BLOCKS))
    grad_out = torch.randn(batch, SEQ_LEN, 4, 8, dtype=torch.float64)
    grad_lse = torch.randn(batch, 4, SEQ_LEN, dtype=torch.float64)
    exact = run_with_gradients(
        lambda *qkv: oracle_attention(*qkv, index, cu_seqlens=as_cu_seqlens(bounds)),
        *inputs,
        grad_out=grad_out,
        grad_lse=grad_lse,
    )
    result = forward_in_parts(inputs, index, geometries)
    grads = backward_in_parts(inputs, index, geometries, result, grad_out, grad_lse)
    for name, got in {**result._asdict(), **grads}.items():
        torch.testing.assert_close(got, exact[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("query_blocks", [[5], [15, 0, 7], range(2, 16, 4)])
def test_some_of_the_queries(query_blocks: Sequence[int]) -> None:
    index = random_index(1, 4, SEQ_LEN, SIZE)
    query, key, value = random_inputs(1, SEQ_LEN, 4, 2, 8)
    at = tokens_of(query_blocks)
    expected = oracle_attention(query, key, value, index)
    got = forward_in_parts((query[:, at], key, value), index, split_geometries("striped", None, query_blocks))
    torch.testing.assert_close(got.out, expected.out[:, at], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.lse, expected.lse[..., at], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["batch", "documents"])
def test_verticals_alone(bounds: list[int] | None) -> None:
    """With keys in hand that no query sees, the first step is the attention of the vertical pairs, and so backward."""
    rows = 1 if bounds is None else len(bounds) - 1
    index, cu_seqlens = random_index(rows, 4, SEQ_LEN, SIZE, cu_seqlens=bounds), as_cu_seqlens(bounds)
    no_verticals = replace(index, num_vertical=torch.zeros_like(index.num_vertical))
    kept = allowed_mask(index, seq_len=SEQ_LEN, cu_seqlens=cu_seqlens)
    kept &= ~allowed_mask(no_verticals, seq_len=SEQ_LEN, cu_seqlens=cu_seqlens)
    at = tokens_of(range(8))
    kept = kept[:, :, at]
    query, key, value = (tensor.requires_grad_() for tensor in random_inputs(1, SEQ_LEN, 4, 4, 8))
    weights = torch.einsum("bqhd,bkhd->bhqk", query[:, at], key).mul(0.3).exp() * kept
    total = weights.sum(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total.unsqueeze(-1).clamp(min=1e-30), value)
    assert bool((total == 0).any())  # rows without a vertical of their own
    assert bool((total > 0).any())

    documents = None if bounds is None else Documents(tuple(bounds))
    whole = BlockGeometry.whole(seq_len=SEQ_LEN, block_size=SIZE, documents=documents)
    later = replace(whole, query_blocks=torch.arange(8), key_blocks=torch.arange(8, 16))
    local, *keys = (tensor.detach() for tensor in (query[:, at], key[:, 32:], value[:, 32:]))
    packed = ReferenceBackend().pack(key.detach(), value.detach(), index, whole)
    got = BACKEND.forward(local, *keys, index, later, softmax_scale=0.3, packed=packed, is_last=True)
    torch.testing.assert_close(got.out, out.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.lse, total.detach().log(), rtol=1e-10, atol=1e-10)

    grad_out = torch.randn_like(out)
    exact = torch.autograd.grad(out, (query, key, value), grad_out)
    grad_query, grad_keys, grad_packed = BACKEND.backward(
        grad_out, local, *keys, got.lse, ReferenceBackend().softmax_delta(grad_out, got.out, None), index, later,
        softmax_scale=0.3, packed=packed, is_last=True,
    )  # fmt: skip
    assert not bool(grad_keys.any())
    none = torch.zeros(2, *key.shape, dtype=key.dtype)
    home = ReferenceBackend().unpack(grad_packed, index, whole, grad_kv=none, dtype=key.dtype)
    for ours, theirs in zip((grad_query, *home), (exact[0][:, at], *exact[1:]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_keys_that_no_query_sees_change_nothing() -> None:
    """A ring step of future keys: empty without a previous result, else that result bit for bit, and zero gradients."""
    index = VerticalSlashIndex.dense(rows=1, num_heads=2, seq_len=SEQ_LEN, block_size=SIZE)
    geometry = BlockGeometry(
        seq_len=SEQ_LEN, block_size=SIZE, query_blocks=torch.arange(4), key_blocks=torch.arange(4, 8)
    )
    query, key, value = random_inputs(1, 16, 2, 1, 8, dtype=torch.float32)
    given, options = (query, key, value), {"softmax_scale": 0.3, "is_last": True}
    alone = BACKEND.forward(*given, index, geometry, previous=None, **options)
    assert torch.equal(alone.out, torch.zeros(1, 16, 2, 8))
    assert torch.equal(alone.lse, torch.full((1, 2, 16), -torch.inf))
    before = AttentionOutput(torch.randn(1, 16, 2, 8), torch.randn(1, 2, 16))
    previous = AttentionOutput(before.out.clone(), before.lse.clone())
    after = BACKEND.forward(*given, index, geometry, previous=previous, **options)
    assert torch.equal(after.out, before.out)
    assert torch.equal(after.lse, before.lse)
    before_query = torch.randn_like(query)
    grad_query, grad_keys, _ = BACKEND.backward(
        torch.randn_like(query), *given, before.lse, before.lse, index, geometry,
        previous=before_query.clone(), **options,
    )  # fmt: skip
    assert torch.equal(grad_query, before_query)
    assert not bool(grad_keys.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_last_step_rounds_once(dtype: torch.dtype) -> None:
    """A last step gives what the step would have handed on, in the dtype of the inputs; lse stays as it is."""
    index = random_index(1, 2, SEQ_LEN, SIZE)
    inputs = random_inputs(1, SEQ_LEN, 2, 1, 8, dtype=dtype)
    geometry = BlockGeometry.whole(seq_len=SEQ_LEN, block_size=SIZE)
    packed = ReferenceBackend().pack(*inputs[1:], index, geometry)
    grad_out, previous = torch.randn(1, SEQ_LEN, 2, 8).to(dtype), torch.randn(1, SEQ_LEN, 2, 8)
    steps = []
    for is_last in (False, True):
        options = {"softmax_scale": 0.3, "is_last": is_last}
        result = BACKEND.forward(*inputs, index, geometry, packed=packed, **options)
        before = AttentionOutput(previous.clone(), result.lse.clone())
        later = BACKEND.forward(*inputs, index, geometry, previous=before, **options)
        given = (grad_out, *inputs)
        statistics = (result.lse, torch.zeros_like(result.lse), index, geometry)
        first_grad, *_ = BACKEND.backward(*given, *statistics, packed=packed, **options)
        later_grad, grad_keys, _ = BACKEND.backward(*given, *statistics, previous=previous.clone(), **options)
        assert {result.lse.dtype, later.lse.dtype, grad_keys.dtype} == {torch.float32}
        steps.append((result.out, later.out, first_grad, later_grad))
    for handed_on, last in zip(*steps, strict=True):
        assert handed_on.dtype == torch.float32
        assert torch.equal(handed_on.to(dtype), last)


def test_garbage_behind_empty_rows_is_never_read() -> None:
    """NaN in ``previous.out`` where ``previous.lse`` is -inf, and NaN gradients of rows that saw no key at all."""
    index = random_index(1, 2, SEQ_LEN, SIZE)
    inputs = random_inputs(1, SEQ_LEN, 2, 1, 8)
    geometries = split_geometries("striped", None, range(NUM_BLOCKS))
    garbage = AttentionOutput(
        torch.full((1, SEQ_LEN, 2, 8), torch.nan, dtype=torch.float64),
        torch.full((1, 2, SEQ_LEN), -torch.inf, dtype=torch.float64),
    )
    expected = slashes_in_parts(inputs, index, geometries, previous=None)
    got = slashes_in_parts(inputs, index, geometries, previous=garbage)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)

    out, lse = forward_in_parts(inputs, index, geometries)
    lse[..., 7] = -torch.inf
    grad_out = torch.randn_like(out)
    grad_out[:, 7] = torch.nan
    grads = backward_in_parts(inputs, index, geometries, AttentionOutput(out, lse), grad_out, torch.zeros_like(lse))
    assert all(bool(grad.isfinite().all()) for grad in grads.values())
    assert not bool(grads["grad_query"][:, 7].any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_does_not_grow_with_the_number_of_parts(dtype: torch.dtype) -> None:
    """Sixteen parts stay within the budget of one: what passes between them is not rounded to the input dtype."""
    index = random_index(1, 4, SEQ_LEN, SIZE)
    inputs = random_inputs(1, SEQ_LEN, 4, 2, 16, dtype=dtype)
    grads = {
        "grad_out": torch.randn(1, SEQ_LEN, 4, 16).to(dtype),
        "grad_lse": torch.randn(1, 4, SEQ_LEN).to(dtype),
    }
    exact = run_with_gradients(lambda *qkv: oracle_attention(*qkv, index), *(t.double() for t in inputs), **grads)
    plain = run_with_gradients(lambda *qkv: plain_attention(*qkv, index), *inputs, **grads)
    geometries = split_geometries("one-block-each", None, range(NUM_BLOCKS))
    result = forward_in_parts(inputs, index, geometries)
    gradients = backward_in_parts(inputs, index, geometries, result, **grads)
    ours = {name: tensor.to(dtype) for name, tensor in gradients.items()}
    rounding = gradient_rounding(*inputs, grad_out=grads["grad_out"])
    assert_all_within_budget({"out": result.out.to(dtype), "lse": result.lse, **ours}, plain, exact, rounding=rounding)
    one = forward_in_parts(inputs, index, split_geometries("one-call", None, range(NUM_BLOCKS)))
    torch.testing.assert_close(result.out, one.out, rtol=2e-6, atol=2e-6)
