"""Packed documents: isolated from each other, positions counted from each start, padding harmless, at every CP size."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from . import tiny_gpt
from .ranks import run_on_ranks
from .test_context_parallel import TOLERANCE

DENSE = dataclasses.replace(tiny_gpt.SPARSE, dense_layers=(1, 2))
BOUNDS = [0, 50, 50, 51, 140, 192]
"""Documents of 50, 0, 1, 89 and 52 tokens: none a multiple of the block, one empty, one of a single token."""


def pack(bounds: list[int]) -> dict[str, Tensor]:
    from megatron_mtraining import megatron as mtraining

    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return tiny_gpt.batch() | {"position_ids": mtraining.document_position_ids(cu_seqlens)}


def run_pack(layout: str, cp_size: int, dense: bool, bounds: list[int]) -> tuple[float, dict[str, Tensor]]:
    from megatron_mtraining import megatron as mtraining

    config = dataclasses.replace(DENSE if dense else tiny_gpt.SPARSE, layout=layout)
    with tiny_gpt.parallel_job(config, cp_size=cp_size, inner_size=2 if cp_size == 4 else 1):
        model = tiny_gpt.build(tiny_gpt.sparse_spec()).double()
        params = mtraining.packed_seq_params(torch.tensor(bounds, dtype=torch.int32, device=tiny_gpt.device()))
        return tiny_gpt.loss_and_gradients(model, pack(bounds), config, packed_seq_params=params)


def run_documents(bounds: list[int]) -> tuple[float, dict[str, Tensor]]:
    """Each document as a sequence of its own on one rank; the mean over all their tokens."""
    whole, total = tiny_gpt.batch(), 0.0
    with tiny_gpt.parallel_job(DENSE):
        model = tiny_gpt.build(tiny_gpt.sparse_spec()).double()
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            if low == high:
                continue
            document = {name: value[:, low:high] for name, value in whole.items()}
            document |= {"position_ids": torch.arange(high - low)[None]}
            # The mean over a document's tokens, scaled so that the documents' sum is the mean over the pack.
            loss = tiny_gpt.mean_loss(model, document, DENSE) * ((high - low) / tiny_gpt.SEQ_LEN)
            loss.backward()
            total += loss.item()
        return total, {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def assert_alike(run: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert run[0] == pytest.approx(expected[0], abs=TOLERANCE)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(run[1][name], gradient, atol=TOLERANCE, rtol=0, msg=name)


@functools.cache
def documents_on_one_rank() -> tuple[float, dict[str, Tensor]]:
    return run_on_ranks(run_documents, 1, bounds=BOUNDS)[0]


@pytest.mark.parametrize(("layout", "cp_size"), [("striped", 1), ("striped", 4), ("contiguous", 2)])
def test_a_pack_is_its_documents(layout: str, cp_size: int):
    expected = documents_on_one_rank()
    for run in run_on_ranks(run_pack, cp_size, layout=layout, cp_size=cp_size, dense=True, bounds=BOUNDS):
        assert_alike(run, expected)


@pytest.mark.parametrize(("layout", "cp_size"), [("node_striped", 4), ("rotated", 3)])
def test_a_sparse_pack_is_the_same_on_every_number_of_ranks(layout: str, cp_size: int):
    (expected,) = run_on_ranks(run_pack, 1, layout=layout, cp_size=1, dense=False, bounds=BOUNDS)
    for run in run_on_ranks(run_pack, cp_size, layout=layout, cp_size=cp_size, dense=False, bounds=BOUNDS):
        assert_alike(run, expected)


LENGTHS = [9, 8, 8, 12, 8, 12]


def padded_after_each_document(dense: bool, poison: bool = False) -> list[Tensor]:
    """Attention of documents of LENGTHS that are padded to multiples of 4, and its gradients, without the padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_mtraining import megatron as mtraining

    bounds = torch.tensor([0, 9, 17, 25, 37, 45, 57], dtype=torch.int32)
    starts = torch.tensor([0, 12, 20, 28, 40, 48, 60], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=starts, max_seqlen_q=12
    )
    with tiny_gpt.parallel_job(DENSE if dense else tiny_gpt.SPARSE):
        attention = build_attention(mtraining)
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(60, heads, 8, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
        )
        padding = ~torch.isin(torch.arange(60), real_rows(bounds, starts))
        with torch.no_grad():
            for tensor in (query, key, value):
                tensor[padding] = 1e3 if poison else 0.0
        out = attention(query, key, value, None, packed_seq_params=params)
        out[~padding].square().sum().backward()
        results = [out.detach(), query.grad, key.grad, value.grad]
        if dense:
            real = [tensor.detach()[~padding].requires_grad_() for tensor in (query, key, value)]
            expected = torch.cat(
                [causal(*parts) for parts in zip(*(each.split(LENGTHS) for each in real), strict=True)]
            )
            expected.square().sum().backward()
            for result, right in zip(results, (expected, *(tensor.grad for tensor in real)), strict=True):
                torch.testing.assert_close(result[~padding], right.detach(), rtol=0, atol=1e-12)
        return [result[~padding] for result in results]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's own attention of one document: ``[tokens, heads, head_dim]`` to ``[tokens, heads * head_dim]``."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    out = F.scaled_dot_product_attention(*(tensor.transpose(0, 1) for tensor in (query, key, value)), is_causal=True)
    return out.transpose(0, 1).flatten(1)


def real_rows(bounds: Tensor, starts: Tensor) -> Tensor:
    lengths = bounds.diff().tolist()
    return torch.cat([torch.arange(length) + start for length, start in zip(lengths, starts[:-1], strict=True)])


def build_attention(mtraining: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    return mtraining.MTrainingCoreAttention(
        config=tiny_gpt.transformer_config(), layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
    )


def padded_runs() -> tuple[list[Tensor], list[Tensor]]:
    """Sparse, without and with poison in the padding; dense is compared with torch's attention of each document."""
    padded_after_each_document(dense=True, poison=True)
    return tuple(padded_after_each_document(dense=False, poison=poison) for poison in (False, True))


def test_padding_between_documents_is_never_seen():
    ((clean, poisoned),) = run_on_ranks(padded_runs, 1)
    for result, other in zip(clean, poisoned, strict=True):
        assert result.isfinite().all()
        assert torch.equal(result, other)
