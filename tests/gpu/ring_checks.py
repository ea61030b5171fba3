"""Attention rank by rank on the CUDA kernels, judged by the error rule against the whole."""

from __future__ import annotations

from functools import partial

from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.backends.cuda import cuda_backend
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    nan_filled_empty,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import oracle_attention

from .cases import Case, rank_by_rank


def check_ring(case: Case, index: VerticalSlashIndex, kind: str, cp_size: int, *, sources_together: int = 1) -> None:
    """Asserts the error rule for out, lse and every gradient of ``cp_size`` ranks in layout ``kind``."""
    inputs, (grad_out, grad_lse) = case.inputs(), case.gradients()
    given = {"grad_out": grad_out, "grad_lse": grad_lse}
    layout = SequenceLayout(kind, seq_len=case.seq_len, cp_size=cp_size)
    ring = {"layout": layout, "sources_together": sources_together, "documents": case.documents}
    with nan_filled_empty():
        ours = rank_by_rank(cuda_backend(), *inputs, index, **given, **ring, softmax_scale=case.scale)
    whole = {"index": index, "softmax_scale": case.scale, "cu_seqlens": case.cu_seqlens}
    low = run_with_gradients(partial(plain_attention, **whole), *inputs, **given)
    exact = run_with_gradients(partial(oracle_attention, **whole), *(tensor.double() for tensor in inputs), **given)
    assert_all_within_budget(ours, low, exact, case=f"{kind} {cp_size} {case}")
