"""Block maps of several ranks: the same kernels, whatever the layout and however many sources one launch takes."""

from __future__ import annotations

import pytest
import torch

from .cases import Case
from .ring_checks import check_ring

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
    check_ring(case, case.index(), kind, cp_size, sources_together=sources_together)
