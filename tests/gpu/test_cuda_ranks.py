"""Block maps of several ranks: the same kernels, whatever the layout and however many sources one launch takes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_mtraining.kernels import cuda_backend
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    nan_filled_empty,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import oracle_attention

from .cases import Case, rank_by_rank

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

DOCUMENTS = (0, 70, 71, 71, 500, 768)


@pytest.mark.parametrize(
    ("kind", "cp_size", "sources_together", "case"),
    [
        ("contiguous", 3, 1, Case(seq_len=768, num_heads=4, num_kv_heads=2, head_dim=128)),
        ("zigzag", 2, 1, Case(seq_len=768, num_heads=4, num_kv_heads=1, head_dim=64, batch=2)),
        ("striped", 4, 1, Case(seq_len=1024, num_heads=2, num_kv_heads=1, head_dim=96, dtype=torch.float16)),
        ("striped", 4, 2, Case(seq_len=1024, num_heads=4, num_kv_heads=2, head_dim=128)),
        ("rotated", 5, 1, Case(seq_len=960, num_heads=2, num_kv_heads=2, head_dim=64)),
        ("rotated", 4, 4, Case(seq_len=1024, num_heads=4, num_kv_heads=2, head_dim=128, max_slash=2)),
        ("striped", 3, 1, Case(seq_len=768, num_heads=2, num_kv_heads=1, head_dim=128, bounds=DOCUMENTS)),
        ("zigzag", 3, 3, Case(seq_len=768, num_heads=2, num_kv_heads=2, head_dim=64, bounds=DOCUMENTS)),
        ("rotated", 4, 1, Case(seq_len=1024, num_heads=4, num_kv_heads=1, head_dim=128, shares_lists=True)),
        ("striped", 3, 1, Case(seq_len=768, num_heads=6, num_kv_heads=2, head_dim=64, shares_lists=True)),
    ],
)
def test_rank_by_rank_agrees_with_the_definition(kind, cp_size, sources_together, case):
    index, inputs, (grad_out, grad_lse) = case.index(), case.inputs(), case.gradients()
    with nan_filled_empty():
        ours = rank_by_rank(
            cuda_backend(), *inputs, index,
            grad_out=grad_out, grad_lse=grad_lse, layout=SequenceLayout(kind, seq_len=case.seq_len, cp_size=cp_size),
            softmax_scale=case.scale, sources_together=sources_together, documents=case.documents,
        )  # fmt: skip
    whole = {"index": index, "softmax_scale": case.scale, "cu_seqlens": case.cu_seqlens}
    given = {"grad_out": grad_out, "grad_lse": grad_lse}
    low = run_with_gradients(partial(plain_attention, **whole), *inputs, **given)
    wide = [tensor.double() for tensor in inputs]
    exact = run_with_gradients(partial(oracle_attention, **whole), *wide, **given)
    assert_all_within_budget(ours, low, exact, case=f"{kind} {cp_size} {case}")
