"""Every kernel on the smallest shapes that use all of it: what `make sanitize` runs under compute-sanitizer.

Several tiles, a short last one, rows of several documents in one, heads that share keys, columns over more than one
word, and ring steps that continue a result.
"""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import MTrainingConfig, select

from .cases import Case
from .ring_checks import check_ring
from .selection_checks import check_lists
from .test_cuda_attention import check

pytestmark = pytest.mark.gpu

CASES = [
    Case(seq_len=333, num_heads=2, num_kv_heads=1, head_dim=128, max_vertical=90),
    Case(seq_len=257, num_heads=2, num_kv_heads=1, head_dim=96, dtype=torch.float16, max_vertical=70, batch=2),
    Case(seq_len=390, num_heads=2, num_kv_heads=2, head_dim=64, max_vertical=70, bounds=(0, 9, 9, 10, 200, 390)),
    Case(seq_len=200, num_heads=4, num_kv_heads=1, head_dim=128, max_vertical=70, shares_lists=True),
]


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_device(case):
    check(case, case.index())


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ring_steps(head_dim):
    case = Case(seq_len=384, num_heads=2, num_kv_heads=1, head_dim=head_dim, max_vertical=70)
    check_ring(case, case.index(), "striped", 2)


ALWAYS = {"sink_tokens": 5, "local_blocks": 1, "dense_below": 0, "num_probe_rows": 64, "num_probe_windows": 8}
CAPS = {"max_vertical": 70, "max_slash": 2, "vertical_top_p": 0.4, "slash_top_p": 0.8}
SELECTIONS = {
    "last_window": MTrainingConfig(budget="top_p", estimator="last_window", **ALWAYS, **CAPS),
    "probe_windows": MTrainingConfig(budget="top_p", **ALWAYS, **CAPS),
    "cost": MTrainingConfig(target_recall=0.7, dense_above=0.6, **ALWAYS),
}


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("config", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_selection(case, config):
    query, key, _ = case.inputs()
    index = select(query, key, config, softmax_scale=case.scale, cu_seqlens=case.cu_seqlens)
    check_lists(index, query, key, config, softmax_scale=case.scale, bounds=case.bounds)
